// The gated delta rule token by token in double: prefill, decode, replay, and token ranges as affine maps.
#include <algorithm>
#include <cmath>

#include "common/state_slots.h"
#include "reference/delta_inputs.h"
#include "reference/table.h"

namespace weft::reference {
namespace {

// What one head reads of one token.
struct Token {
  std::vector<double> decay;  // [K], e^g
  const double* k = nullptr;  // [K]
};

// The key as used and the log decay are rounded to f32 before anything else, and so is every correction e_t, record or not: they
// are what DeltaRecord holds, so replay repeats the very operations of decode and leaves the same bits.
struct Tokens {
  Tokens(const HeadRows& keys, const HeadRows& log_decays) : k(keys), g(log_decays) {
    for (double& x : k.values) x = to_f32(x);
    for (double& x : g.values) x = to_f32(x);
  }
  Token token(int64_t i, int64_t hv, int64_t hk) const {
    Token token{std::vector<double>(static_cast<size_t>(k.width)), k.at(i, hk)};
    for (int64_t c = 0; c < k.width; ++c)
      token.decay[static_cast<size_t>(c)] = g.width == 1 && c > 0 ? token.decay[0] : std::exp(g.at(i, hv)[c]);
    return token;
  }
  HeadRows k, g;
};

// e = beta (v - D k) with D = S diag(decay).
void correct(const State& state, const Token& token, double beta, const double* v, std::vector<double>& delta) {
  const size_t V = delta.size(), K = token.decay.size();
  std::fill(delta.begin(), delta.end(), 0.0);
  for (size_t c = 0; c < K; ++c) {
    const double decay = token.decay[c], k = token.k[c];
    for (size_t j = 0; j < V; ++j) delta[j] += decay * state[c * V + j] * k;
  }
  for (size_t j = 0; j < V; ++j) delta[j] = to_f32(beta * (v[j] - delta[j]));
}

// S <- D + e k^T: all that decode and replay do to a state. Not inlined, so that both run the same instructions.
[[gnu::noinline]] void fold(State& state, const Token& token, const double* delta, size_t V) {
  for (size_t c = 0; c < token.decay.size(); ++c) {
    const double decay = token.decay[c], k = token.k[c];
    for (size_t j = 0; j < V; ++j) state[c * V + j] = decay * state[c * V + j] + delta[j] * k;
  }
}

// S q
void read(const State& state, const double* q, std::vector<double>& o) {
  const size_t V = o.size(), K = state.size() / V;
  std::fill(o.begin(), o.end(), 0.0);
  for (size_t c = 0; c < K; ++c)
    for (size_t j = 0; j < V; ++j) o[j] += state[c * V + j] * q[c];
}

State initial_state(const DeltaStates& states, const StateSlots& slots, int64_t hv, int64_t V, int64_t K) {
  if (slots.in < 0) return State(static_cast<size_t>(V * K), 0);
  return load_state(states.in, at(states.in, slots.in, hv), V, K, states.layout);
}

void final_state(const DeltaStates& states, const StateSlots& slots, int64_t hv, const State& state, int64_t V, int64_t K) {
  if (slots.out >= 0) store_state(states.out, at(states.out, slots.out, hv), state, V, K, states.layout);
}

// What prefill and decode may write besides outputs and final states.
struct Extras {
  DeltaRecord record;
  Tensor checkpoints;
  int64_t checkpoint_every = 0;
  bool pause =
      false;  // round the state to f32 every kCheckpointUnit tokens, as if the call had ended there and another had continued
};

template <class Args>
void run_rule(const Args& args, const Extras& extras) {
  const int64_t T = args.k.size(0), Hk = args.k.size(1), K = args.k.size(2), Hv = args.v.size(1), V = args.v.size(2);
  const double scale = scale_or_default<double>(args.scale, K);
  for (int64_t n = 0; n < args.sequences.count; ++n) {
    const TokenRange range = tokens_of(args.sequences, n, T);
    if (!range.legal) continue;
    HeadRows o{Hv, V, std::vector<double>(static_cast<size_t>(range.length() * Hv * V), 0)};
    const StateSlots slots = state_slots(args.states, n);
    if (slots.inert) {
      store_rows(args.o, o, range);
      continue;
    }
    HeadRows q = load_directions(args.q, range, args.l2_norm);
    for (double& x : q.values) x *= scale;
    const HeadRows v = load_rows(args.v, range), beta = load_strength(args.gates, range);
    const Tokens tokens(load_directions(args.k, range, args.l2_norm), load_log_decay(args.gates, range));
    HeadRows deltas = o;
    std::vector<double> delta(static_cast<size_t>(V)), out(static_cast<size_t>(V));
    for (int64_t hv = 0; hv < Hv; ++hv) {
      const int64_t hk = key_head(hv, Hv, Hk, args.head_map);
      State state = initial_state(args.states, slots, hv, V, K);
      for (int64_t i = 0; i < range.length(); ++i) {
        const Token token = tokens.token(i, hv, hk);
        correct(state, token, *beta.at(i, hv), v.at(i, hv), delta);
        fold(state, token, delta.data(), delta.size());
        read(state, q.at(i, hk), out);
        std::copy(delta.begin(), delta.end(), deltas.at(i, hv));
        std::copy(out.begin(), out.end(), o.at(i, hv));
        if (extras.pause && (i + 1) % kCheckpointUnit == 0) std::transform(state.begin(), state.end(), state.begin(), to_f32);
        if (extras.checkpoint_every > 0 && (i + 1) % extras.checkpoint_every == 0)
          store_state(extras.checkpoints, at(extras.checkpoints, n, (i + 1) / extras.checkpoint_every - 1, hv), state, V, K,
                      args.states.layout);
      }
      final_state(args.states, slots, hv, state, V, K);
    }
    store_rows(args.o, o, range);
    if (!extras.record.k.present()) continue;
    store_rows(extras.record.k, tokens.k, range);
    store_rows(extras.record.delta, deltas, range);
    store_rows(extras.record.g, tokens.g, range);
  }
}

// Schedule::invariant promises that prefill(a) + prefill(b) has the bits of prefill(a + b) at multiples of 64 tokens (f32 states).
void prefill(const Stream&, const GatedDeltaRulePrefillArgs& args) {
  run_rule(args, {{}, args.checkpoints, args.checkpoint_every, args.schedule == Schedule::invariant});
}

void decode(const Stream&, const GatedDeltaRuleDecodeArgs& args) { run_rule(args, {args.record, {}, 0, false}); }

void replay(const Stream&, const GatedDeltaRuleReplayArgs& args) {
  const DeltaRecord& record = args.record;
  const int64_t T = record.k.size(0), Hk = record.k.size(1), K = record.k.size(2);
  const int64_t Hv = record.delta.size(1), V = record.delta.size(2);
  for (int64_t n = 0; n < args.sequences.count; ++n) {
    TokenRange range = tokens_of(args.sequences, n, T);
    const StateSlots slots = state_slots(args.states, n);
    if (!range.legal || slots.inert) continue;
    range.end = range.begin + std::clamp<int64_t>(index_at(args.accepted, n), 0, range.length());
    const Tokens tokens(load_rows(record.k, range), load_rows(record.g, range));
    const HeadRows deltas = load_rows(record.delta, range);
    for (int64_t hv = 0; hv < Hv; ++hv) {
      State state = initial_state(args.states, slots, hv, V, K);
      for (int64_t i = 0; i < range.length(); ++i)
        fold(state, tokens.token(i, hv, key_head(hv, Hv, Hk, args.head_map)), deltas.at(i, hv), static_cast<size_t>(V));
      final_state(args.states, slots, hv, state, V, K);
    }
  }
}

// With v = 0, the rule turns the rows of the identity into the rows of P; with the given v, it turns zeros into the rows of Q. One run
// over K + V rows gives both.
void summarize(const Stream&, const GatedDeltaRuleSummarizeArgs& args) {
  const int64_t T = args.k.size(0), Hk = args.k.size(1), K = args.k.size(2), Hv = args.v.size(1), V = args.v.size(2);
  const int64_t R = K + V;
  for (int64_t n = 0; n < args.sequences.count; ++n) {
    const TokenRange range = tokens_of(args.sequences, n, T);
    if (!range.legal) continue;
    const HeadRows v = load_rows(args.v, range), beta = load_strength(args.gates, range);
    const Tokens tokens(load_directions(args.k, range, args.l2_norm), load_log_decay(args.gates, range));
    std::vector<double> padded(static_cast<size_t>(R), 0), delta(static_cast<size_t>(R));
    for (int64_t hv = 0; hv < Hv; ++hv) {
      State state(static_cast<size_t>(R * K), 0);
      for (int64_t c = 0; c < K; ++c) state[static_cast<size_t>(c * R + c)] = 1;
      for (int64_t i = 0; i < range.length(); ++i) {
        std::copy_n(v.at(i, hv), V, padded.data() + K);
        const Token token = tokens.token(i, hv, key_head(hv, Hv, Hk, args.head_map));
        correct(state, token, *beta.at(i, hv), padded.data(), delta);
        fold(state, token, delta.data(), delta.size());
      }
      for (int64_t c = 0; c < K; ++c) {
        for (int64_t r = 0; r < K; ++r) store(args.p, at(args.p, n, hv, r, c), state[static_cast<size_t>(c * R + r)]);
        for (int64_t r = 0; r < V; ++r) store(args.q, at(args.q, n, hv, r, c), state[static_cast<size_t>(c * R + K + r)]);
      }
    }
  }
}

// S p + q, for a state of `rows` rows.
State map_state(const State& state, const State& p, const State& q, int64_t rows, int64_t K) {
  State mapped = q;
  for (int64_t c = 0; c < K; ++c)
    for (int64_t m = 0; m < K; ++m)
      for (int64_t r = 0; r < rows; ++r)
        mapped[static_cast<size_t>(c * rows + r)] += state[static_cast<size_t>(m * rows + r)] * p[static_cast<size_t>(c * K + m)];
  return mapped;
}

void compose(const Stream&, const GatedDeltaRuleComposeArgs& args) {
  const int64_t N = args.q1.size(0), Hv = args.q1.size(1), V = args.q1.size(2), K = args.q1.size(3);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t hv = 0; hv < Hv; ++hv) {
      const State p1 = load_state(args.p1, at(args.p1, n, hv), K, K), q1 = load_state(args.q1, at(args.q1, n, hv), V, K);
      const State p2 = load_state(args.p2, at(args.p2, n, hv), K, K), q2 = load_state(args.q2, at(args.q2, n, hv), V, K);
      store_state(args.p, at(args.p, n, hv), map_state(p1, p2, State(p1.size(), 0), K, K), K, K);
      store_state(args.q, at(args.q, n, hv), map_state(q1, p2, q2, V, K), V, K);
    }
}

void apply(const Stream&, const GatedDeltaRuleApplyArgs& args) {
  const int64_t N = args.q.size(0), Hv = args.q.size(1), V = args.q.size(2), K = args.q.size(3);
  for (int64_t n = 0; n < N; ++n) {
    const StateSlots slots = state_slots(args.states, n);
    if (slots.inert) continue;
    for (int64_t hv = 0; hv < Hv; ++hv) {
      const State p = load_state(args.p, at(args.p, n, hv), K, K), q = load_state(args.q, at(args.q, n, hv), V, K);
      final_state(args.states, slots, hv, map_state(initial_state(args.states, slots, hv, V, K), p, q, V, K), V, K);
    }
  }
}

}  // namespace

OpEntry<GatedDeltaRulePrefillArgs> gated_delta_rule_prefill_entry() { return entry<prefill>(kAllFloats); }
OpEntry<GatedDeltaRuleDecodeArgs> gated_delta_rule_decode_entry() { return entry<decode>(kAllFloats); }
OpEntry<GatedDeltaRuleReplayArgs> gated_delta_rule_replay_entry() { return entry<replay>(kAllFloats); }
OpEntry<GatedDeltaRuleSummarizeArgs> gated_delta_rule_summarize_entry() { return entry<summarize>(kAllFloats); }
OpEntry<GatedDeltaRuleComposeArgs> gated_delta_rule_compose_entry() { return entry<compose>(kOnlyF32); }
OpEntry<GatedDeltaRuleApplyArgs> gated_delta_rule_apply_entry() { return entry<apply>(kAllFloats); }

}  // namespace weft::reference
