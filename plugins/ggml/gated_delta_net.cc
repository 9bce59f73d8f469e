// GATED_DELTA_NET: gated_delta_rule_prefill and gated_delta_rule_decode on the memory of ggml, without copies.
#include <algorithm>
#include <cmath>

#include "engine.h"
#include "tensors.h"
#include "weft/gated_delta_rule.h"

namespace weft_ggml {
namespace {

// Calls of at most this many tokens per sequence use the decode path. Measured: docs/lab/llama-cpp.md.
constexpr int64_t kStepTokens = 12;
static_assert(kStepTokens <= weft::kMaxDecodeTokens);

// A single token of states with fewer numbers stays with ggml: the cuts of the graph around the node then cost as much as Weft saves. 32 heads of 128 are
// taken, 16 are not. Measured: docs/lab/llama-cpp.md. The library of the tests takes them all.
#ifdef WEFT_GGML_OP_TESTS
constexpr int64_t kLeastStateNumbers = 0;
#else
constexpr int64_t kLeastStateNumbers = int64_t{32} * 128 * 128;
#endif

// A node in Weft's letters. S is K and V: ggml's op has square states.
struct Rule {
  const ggml_tensor *q, *k, *v, *g, *beta, *state;
  int64_t S, Hk, Hv, T, N;
  int64_t snapshots;  // states that the op returns: after the last token, after the last but one, and so on
  bool per_channel;   // is there a decay per channel?

  int64_t kept() const { return std::min(T, snapshots); }  // ggml leaves the other snapshots unwritten
  int64_t state_numbers() const { return N * Hv * S * S; }
};

Rule rule_of(const ggml_tensor* node) {
  const auto& src = node->src;
  const ggml_tensor *k = src[1], *v = src[2], *g = src[3];
  return {src[0], k, v, g, src[4], src[5], v->ne[0], k->ne[1], v->ne[1], v->ne[2], v->ne[3], node->op_params[0], g->ne[0] > 1};
}

// Addresses of the tensors of a node.
struct Places {
  float *q, *k, *v, *g, *beta, *state, *o, *snapshots;
};

// Tokens [first, first + count) of sequences [sequence, sequence + sequences), from states `in` to states `out`.
struct Span {
  int64_t first, count, sequence, sequences;
  float *in, *out;
};

// Can the tokens of all sequences be one packed [T, H, S] view? Not if the stride of tokens is broken between sequences, and not if
// sequences share queries or keys.
bool packs(const Rule& rule, int64_t count) {
  if (rule.N == 1) return true;
  const auto even = [&](const ggml_tensor* t) {
    return t->ne[3] == rule.N && (count == 1 || (count == rule.T && t->nb[3] == static_cast<size_t>(rule.T) * t->nb[2]));
  };
  return even(rule.q) && even(rule.k) && even(rule.v);
}

template <class Args>
Args args_of(const Rule& rule, const Places& at, const Span& span) {
  const int64_t rows = span.count * span.sequences, S = rule.S;
  const bool across = span.count == 1;  // with one token per sequence, the stride of tokens is the stride of sequences
  const auto rows_of = [&](const ggml_tensor* t, float* data, int64_t heads) {
    const int64_t sequence = span.sequence / (rule.N / t->ne[3]);  // sequences may share queries and keys
    return view(data + sequence * stride(t, 3) + span.first * stride(t, 2), {rows, heads, t->ne[0]},
                {stride(t, across ? 3 : 2), stride(t, 1), 1});
  };
  Args args;
  args.q = rows_of(rule.q, at.q, rule.Hk);
  args.k = rows_of(rule.k, at.k, rule.Hk);
  args.v = rows_of(rule.v, at.v, rule.Hv);
  args.gates.g = rows_of(rule.g, at.g, rule.Hv);
  if (!rule.per_channel) args.gates.g.rank = 2;
  args.gates.beta = rows_of(rule.beta, at.beta, rule.Hv);
  args.gates.beta.rank = 2;
  const int64_t row = rule.Hv * S;
  args.o = view(at.o + (span.sequence * rule.T + span.first) * row, {rows, rule.Hv, S}, {across ? rule.T * row : row, S, 1});
  const int64_t offset = span.sequence * rule.Hv * S * S;
  args.states.in = weft::dense(span.in + offset, weft::DType::f32, {span.sequences, rule.Hv, S, S});
  args.states.out = weft::dense(span.out + offset, weft::DType::f32, {span.sequences, rule.Hv, S, S});
  args.scale = 1.0f / std::sqrt(static_cast<float>(S));
  args.head_map = weft::HeadMap::tiled;
  args.sequences = weft::Sequences::uniform(span.sequences);
  // Token ranges take 2.3 times the operations, so they gain from three threads on, and only in longer inputs than ggml's graphs,
  // which have at most 2048 tokens.
  if constexpr (requires { args.schedule; }) args.schedule = weft::Schedule::invariant;
  return args;
}

// Calls work(args, op) with the op that computes the span.
template <class Work>
void with_args(const Rule& rule, const Places& at, const Span& span, Work work) {
  if (span.count <= kStepTokens)
    work(args_of<weft::GatedDeltaRuleDecodeArgs>(rule, at, span), &weft::gated_delta_rule_decode);
  else
    work(args_of<weft::GatedDeltaRulePrefillArgs>(rule, at, span), &weft::gated_delta_rule_prefill);
}

// Calls work(span) for tokens [first, first + count) of all sequences, in as few calls as their strides allow.
template <class Work>
void for_spans(const Rule& rule, int64_t first, int64_t count, float* in, float* out, Work work) {
  const int64_t sequences = packs(rule, count) ? rule.N : 1;
  for (int64_t n = 0; n < rule.N; n += sequences) work(Span{first, count, n, sequences, in, out});
}

// Calls work(span) for all tokens of the node, in order. Where the node wants snapshots of earlier states, its last tokens are
// computed one by one, each from the snapshot of the previous token to a snapshot of its own.
template <class Work>
void for_all_spans(const Rule& rule, const Places& at, Work work) {
  const int64_t kept = rule.kept(), together = rule.T - kept + 1;
  const auto snapshot = [&](int64_t back) { return at.snapshots + back * rule.state_numbers(); };
  for_spans(rule, 0, together, at.state, snapshot(kept - 1), work);
  for (int64_t back = kept - 2; back >= 0; --back) for_spans(rule, rule.T - 1 - back, 1, snapshot(back + 1), snapshot(back), work);
}

// ggml_gated_delta_net() checks most of these conditions, but a node may also come from a file or another program.
bool has_legal_form(const ggml_tensor* node) {
  for (int i = 0; i < 6; ++i)
    if (!is_f32(node->src[i])) return false;
  if (node->type != GGML_TYPE_F32 || !ggml_is_contiguous(node)) return false;
  const Rule rule = rule_of(node);
  if (rule.S < 1 || rule.Hk < 1 || rule.Hv < 1 || rule.T < 1 || rule.N < 1 || rule.snapshots < 1) return false;
  const auto is = [](const ggml_tensor* t, int64_t a, int64_t b, int64_t c, int64_t d) {
    return t->ne[0] == a && t->ne[1] == b && t->ne[2] == c && t->ne[3] == d;
  };
  const auto rows = [](const ggml_tensor* t) { return t->ne[0] == 1 || t->nb[0] == kFloat; };
  const auto keys = [&](const ggml_tensor* t) {
    return t->ne[3] > 0 && rule.N % t->ne[3] == 0 && is(t, rule.S, rule.Hk, rule.T, t->ne[3]) && rows(t);
  };
  if (!keys(rule.q) || !keys(rule.k) || rule.Hv % rule.Hk != 0 || !rows(rule.v)) return false;
  const bool gate = is(rule.g, rule.per_channel ? rule.S : 1, rule.Hv, rule.T, rule.N) && ggml_is_contiguous(rule.g);
  const bool strength = is(rule.beta, 1, rule.Hv, rule.T, rule.N) && ggml_is_contiguous(rule.beta);
  const bool states = is(rule.state, rule.S, rule.S, rule.Hv, rule.N) && ggml_is_contiguous(rule.state);
  return gate && strength && states &&
         ggml_nelements(node) == rule.T * rule.N * rule.Hv * rule.S + rule.snapshots * rule.state_numbers();
}

}  // namespace

bool takes_gated_delta_net(const ggml_tensor* node) {
  if (!has_legal_form(node)) return false;
  const Rule rule = rule_of(node);
  if (rule.T == 1 && rule.state_numbers() < kLeastStateNumbers) return false;
  const weft::Stream stream{.threads = 1};
  const Places at{pretended(1), pretended(2), pretended(3), pretended(4), pretended(5), pretended(6), pretended(7), pretended(8)};
  bool taken = true;
  int64_t asked = 0;  // tokens of the previous span; spans of equally many tokens have the same form
  for_all_spans(rule, at, [&](const Span& span) {
    if (span.count == asked) return;
    asked = span.count;
    with_args(rule, at, span, [&](const auto& args, auto) { taken = taken && supports(stream, args).ok(); });
  });
  return taken;
}

int compute_gated_delta_net(Engine& engine, ggml_tensor* node, ggml_tensor*) {
  const Rule rule = rule_of(node);
  const auto data = [](const ggml_tensor* t) { return static_cast<float*>(t->data); };
  float* const o = data(node);
  const Places at{data(rule.q),
                  data(rule.k),
                  data(rule.v),
                  data(rule.g),
                  data(rule.beta),
                  data(rule.state),
                  o,
                  o + rule.T * rule.N * rule.Hv * rule.S};
  for_all_spans(rule, at,
                [&](const Span& span) { with_args(rule, at, span, [&](const auto& args, auto op) { run(engine, args, op); }); });
  return 1;
}

int64_t tokens_of_gated_delta_net(const ggml_tensor* node) { return node->src[2]->ne[2] * node->src[2]->ne[3]; }

}  // namespace weft_ggml
