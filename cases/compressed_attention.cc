// Cases of attention_scores, attention_values, attention_partials, attention_merge and compressed_attention.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "cases/attention_inputs.h"
#include "cases/builders.h"
#include "common/kv_index.h"
#include "common/partials.h"
#include "common/uncompressed_tiles.h"

namespace weft::cases {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

Tensor random_sinks(Options& options, Memory& memory, Rng& rng, int64_t Hq) {
  if (!options.flag("sinks")) return {};
  const Tensor sinks = memory.make(DType::f32, {Hq});
  fill_normal(sinks, rng);
  return sinks;
}

AttentionPartials make_partials(Memory& memory, PartialLayout layout, int64_t T, int64_t Hq, int64_t B, int64_t Dv) {
  AttentionPartials p;
  p.layout = layout;
  p.count = B;
  if (layout == PartialLayout::interleaved) {
    p.buffer = memory.make(DType::f32, {T, Hq, B, Dv + 2});
    p.buffer = dense(p.buffer.data, DType::f32, {p.buffer.elements()});
    return p;
  }
  p.o = memory.make(DType::f32, {T, Hq, B, Dv});
  p.m = memory.make(DType::f32, {T, Hq, B});
  p.l = memory.make(DType::f32, {T, Hq, B});
  return p;
}

PartialLayout partial_layout(Options& options) {
  return options.choice("partials", "blocks", {"blocks", "interleaved"}) == "blocks" ? PartialLayout::blocks
                                                                                     : PartialLayout::interleaved;
}

// Attention by split-KV partials and their merge, on the reference.
struct ByPartials {
  Tensor o, lse;
};
ByPartials by_partials(Memory& memory, const AttentionSetting& s, const AttentionQueries& queries, const Tensor& sinks,
                       int64_t block, PartialLayout layout) {
  const KvCache& cache = s.kv.cache;
  const int64_t B = (sequence_capacity(cache) + block - 1) / block;
  AttentionPartialsArgs split{queries, cache, s.mask, block, make_partials(memory, layout, s.T, s.Hq, B, s.kv.Dv)};
  run_op(kReference, split);
  AttentionMergeArgs merge;
  merge.partials = split.partials;
  merge.v_format = cache.v.format;
  merge.sinks = sinks;
  merge.kv_heads = s.kv.Hk;
  merge.o = memory.make(DType::f32, {s.T, s.Hq, s.kv.Dv});
  merge.lse = memory.make(DType::f32, {s.T, s.Hq});
  run_op(kReference, merge);
  return {merge.o, merge.lse};
}

// The largest error of a sequence. Tokens outside every sequence are not written, so they are not compared.
double compare_rows(const AttentionSetting& s, const Tensor& got, const Tensor& want) {
  double worst = 0;
  for (int64_t n = 0; n < s.tokens.count; ++n)
    if (const int64_t rows = s.tokens.length(n); rows > 0)
      worst = std::max(worst, relative_rms(rows_of(got, s.tokens.begin(n), rows), rows_of(want, s.tokens.begin(n), rows)));
  return worst;
}

// The arguments of a call with sequence n alone.
CompressedAttentionArgs alone(const CompressedAttentionArgs& args, const Tokens& tokens, int64_t n) {
  CompressedAttentionArgs one = args;
  const int64_t begin = tokens.begin(n), rows = tokens.length(n);
  one.queries.q = rows_of(args.queries.q, begin, rows);
  if (args.queries.positions.present()) one.queries.positions = rows_of(args.queries.positions, begin, rows);
  one.queries.sequences = Sequences::uniform(1);
  one.o = rows_of(args.o, begin, rows);
  if (args.lse.present()) one.lse = rows_of(args.lse, begin, rows);
  one.cache.lengths = rows_of(args.cache.lengths, n, 1);
  if (args.cache.slots.present()) one.cache.slots = rows_of(args.cache.slots, n, 1);
  if (args.cache.page_table.present()) one.cache.page_table = rows_of(args.cache.page_table, n, 1);
  if (!args.cache.slots.present() && !args.cache.page_table.present())
    for (KvSide* side : {&one.cache.k, &one.cache.v})
      for (Tensor* t : {&side->codes, &side->gains})
        if (t->present()) *t = rows_of(*t, n, 1);
  return one;
}

// Prefill over uncompressed 16-bit tiles may multiply in 16 bits; q and the weights then carry 11 bits.
bool f16_products(const AttentionSetting& s) {
  return uncompressed_tiles(s.kv.cache) && max_tokens(s.queries.sequences, s.T) * (s.Hq / s.kv.Hk) >= kPromptRows;
}

}  // namespace

// More options: stype (of the scores).
std::unique_ptr<Problem> build_attention_scores(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<AttentionScoresArgs>>();
  Memory& memory = problem->memory();
  const AttentionSetting s = make_attention(options, memory, rng);
  const DType type = options.dtype("stype", DType::f32);
  const int64_t columns = sequence_capacity(s.kv.cache);
  problem->args = {s.queries, s.kv.cache, s.mask, memory.make(type, {s.T, s.Hq, columns})};
  problem->output(
      "scores", [](AttentionScoresArgs& a) -> Tensor& { return a.scores; }, attention_bar(s.integer_scores, false, type, 0));
  problem->work.read_bytes = cache_bytes(s.kv.cache, s.live()) / 2 + bytes_of(s.queries.q);
  problem->work.written_bytes = bytes_of(problem->args.scores);
  problem->work.flops = 2 * s.pairs() * static_cast<double>(s.kv.Dk);
  problem->second = [s, type, columns](const AttentionScoresArgs& result) {
    Memory own;
    const Tensor want = own.make(DType::f32, {s.T, s.Hq, columns});
    fill(want, kNone);
    const auto scores = direct_scores(s, result.queries);
    for (size_t t = 0; t < scores.size(); ++t)
      for (size_t h = 0; h < scores[t].size(); ++h)
        for (size_t j = 0; j < scores[t][h].size(); ++j)
          set(want, (static_cast<int64_t>(t) * s.Hq + static_cast<int64_t>(h)) * columns + static_cast<int64_t>(j),
              scores[t][h][j]);
    return Findings{{"scores, over decoded rows", compare_rows(s, result.scores, want), arithmetic() + rounding(type, 0)}};
  };
  return problem;
}

// More options: wtype (of the weights), threshold, odtype, domain=original|rotated.
std::unique_ptr<Problem> build_attention_values(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<AttentionValuesArgs>>();
  Memory& memory = problem->memory();
  const AttentionSetting s = make_attention(options, memory, rng);
  AttentionValuesArgs& args = problem->args;
  const int64_t columns = sequence_capacity(s.kv.cache);
  const DType type = options.dtype("odtype", s.dtype);
  args.weights = memory.make(options.dtype("wtype", DType::f32), {s.T, s.Hq, columns});
  for (int64_t n = 0; n < s.tokens.count; ++n)  // columns beyond the live tokens keep their poison
    for (int64_t i = 0; i < s.tokens.length(n) * s.Hq; ++i)
      for (int64_t j = 0; j < live_tokens(s.kv.cache, s.lengths[static_cast<size_t>(n)]); ++j)
        set(args.weights, (s.tokens.begin(n) * s.Hq + i) * columns + j, rng.uniform());
  args.sequences = s.tokens.sequences;
  args.cache = s.kv.cache;
  if (const double threshold = options.real("threshold", 0); threshold > 0) args.threshold = static_cast<float>(threshold);
  args.domain = options.choice("domain", "original", {"original", "rotated"}) == "rotated" ? KvDomain::rotated : KvDomain::original;
  args.o = memory.make(type, {s.T, s.Hq, s.kv.Dv});
  const bool integer = args.cache.v.format.grid_step.has_value() && !args.cache.v.format.passthrough;
  problem->output(
      "o", [](AttentionValuesArgs& a) -> Tensor& { return a.o; }, attention_bar(integer, false, type, 0));
  problem->work.read_bytes = cache_bytes(s.kv.cache, s.live()) / 2 + bytes_of(args.weights);
  problem->work.written_bytes = bytes_of(args.o);
  problem->work.flops = 2 * s.pairs() * static_cast<double>(s.kv.Dv);
  problem->second = [s, type](const AttentionValuesArgs& result) {
    Memory own;
    const Tensor want = own.make(DType::f32, {s.T, s.Hq, s.kv.Dv});
    fill(want, 0);
    KvFormat format = s.kv.cache.v.format;
    for (int64_t n = 0; n < s.tokens.count; ++n) {
      const Tensor v = decoded(own, s, n, true);
      if (result.domain == KvDomain::rotated && !format.passthrough) {  // the rotated domain excludes the mean
        for (int64_t j = 0; j < v.size(0) && format.mean.present(); ++j)
          for (int64_t c = 0; c < v.size(1) * v.size(2); ++c)
            set(v, j * v.stride(0) + c, get(v, j * v.stride(0) + c) - get(format.mean, c));
        run_op(kReference, KvRotateArgs{v, v, format, false});
      }
      for (int64_t t = s.tokens.begin(n); t < s.tokens.begin(n) + s.tokens.length(n); ++t)
        for (int64_t h = 0; h < s.Hq; ++h)
          for (int64_t d = 0; d < s.kv.Dv; ++d) {
            double sum = 0;
            for (int64_t j = 0; j < v.size(0); ++j) {
              const double weight = get(result.weights, t * result.weights.stride(0) + h * result.weights.stride(1) + j);
              if (result.threshold && weight < *result.threshold) continue;
              sum += weight * get(v, j * v.stride(0) + h / (s.Hq / s.kv.Hk) * v.stride(1) + d);
            }
            set(want, (t * s.Hq + h) * s.kv.Dv + d, sum);
          }
    }
    return Findings{{"o, over decoded rows", compare_rows(s, result.o, want), arithmetic() + rounding(type, 0)}};
  };
  return problem;
}

// More options: block (tokens of a block), partials=blocks|interleaved.
std::unique_ptr<Problem> build_attention_partials(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<AttentionPartialsArgs>>();
  Memory& memory = problem->memory();
  const AttentionSetting s = make_attention(options, memory, rng);
  const int64_t block = options.integer("block", 32, 1), B = (sequence_capacity(s.kv.cache) + block - 1) / block;
  const PartialLayout layout = partial_layout(options);
  problem->args = {s.queries, s.kv.cache, s.mask, block, make_partials(memory, layout, s.T, s.Hq, B, s.kv.Dv)};
  const Bar bar = attention_bar(s.integer_scores, false, DType::f32, 0);
  if (layout == PartialLayout::interleaved) {
    problem->output(
        "partials.buffer", [](AttentionPartialsArgs& a) -> Tensor& { return a.partials.buffer; }, bar);
  } else {
    problem->output(
        "partials.o", [](AttentionPartialsArgs& a) -> Tensor& { return a.partials.o; }, bar);
    problem->output(
        "partials.m", [](AttentionPartialsArgs& a) -> Tensor& { return a.partials.m; }, bar);
    problem->output(
        "partials.l", [](AttentionPartialsArgs& a) -> Tensor& { return a.partials.l; }, bar);
  }
  problem->work.read_bytes = cache_bytes(s.kv.cache, s.live()) + bytes_of(s.queries.q);
  problem->work.written_bytes = 4 * static_cast<double>(s.T * s.Hq * B * (s.kv.Dv + 2));
  problem->work.flops = 2 * s.pairs() * static_cast<double>(s.kv.Dk + s.kv.Dv);
  problem->second = [s](const AttentionPartialsArgs& result) {
    Memory own;
    AttentionMergeArgs merge;
    merge.partials = result.partials;
    merge.v_format = s.kv.cache.v.format;
    merge.kv_heads = s.kv.Hk;
    merge.o = own.make(DType::f32, {s.T, s.Hq, s.kv.Dv});
    merge.lse = own.make(DType::f32, {s.T, s.Hq});
    run_op(kReference, merge);
    CompressedAttentionArgs whole;
    whole.queries = result.queries;
    whole.cache = result.cache;
    whole.mask = result.mask;
    whole.o = own.make(DType::f32, {s.T, s.Hq, s.kv.Dv});
    whole.lse = own.make(DType::f32, {s.T, s.Hq});
    run_op(kReference, whole);
    return Findings{{"o, merged, against the single call", compare_rows(s, merge.o, whole.o), 1e-5},
                    {"lse, merged, against the single call", compare_rows(s, merge.lse, whole.lse), 1e-5}};
  };
  return problem;
}

// Options: T, Hq, Hk, D, blocks, partials=blocks|interleaved, empty=1 (some blocks, and all blocks of one row, are empty), sinks,
// odtype, lse, domain, and those of a format for V (vbits, vmean, rotation).
std::unique_ptr<Problem> build_attention_merge(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<AttentionMergeArgs>>();
  Memory& memory = problem->memory();
  AttentionMergeArgs& args = problem->args;
  const int64_t T = options.integer("T", 3), Hk = options.integer("Hk", 2, 1), Hq = options.integer("Hq", 2 * Hk, 1);
  const int64_t D = options.integer("D", 64, 8, kMaxHeadDim), B = options.integer("blocks", 5, 1);
  const PartialLayout layout = partial_layout(options);
  const bool empties = options.flag("empty", true);
  const DType type = options.dtype("odtype", DType::f32);
  args.v_format = make_format(options, memory, rng, 'v', Hk, D);
  args.kv_heads = Hk;
  args.partials = make_partials(memory, layout, T, Hq, B, D);
  args.sinks = random_sinks(options, memory, rng, Hq);
  args.domain = options.choice("domain", "original", {"original", "rotated"}) == "rotated" ? KvDomain::rotated : KvDomain::original;
  args.o = memory.make(type, {T, Hq, D});
  if (options.flag("lse", true)) args.lse = memory.make(DType::f32, {T, Hq});
  const PartialsView view = partials_view(args.partials, T, Hq, D);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t h = 0; h < Hq; ++h)
      for (int64_t b = 0; b < B; ++b) {
        const bool empty = empties && ((t == T - 1 && h == 0) || (t + h + b) % 3 == 1);
        view.m[view.m_at(t, h, b)] =
            static_cast<float>(empty ? (layout == PartialLayout::interleaved && b % 2 ? -FLT_MAX : kNone) : 3 * rng.normal());
        view.l[view.l_at(t, h, b)] = empty ? 0 : static_cast<float>(rng.uniform(1, 30));
        for (int64_t d = 0; d < D && !empty; ++d)  // the o of an empty block stays poison: the op must not read it
          view.o[view.o_at(t, h, b, d)] = static_cast<float>(5 * rng.normal());
      }
  const Bar bar = attention_bar(false, false, type, 0);
  problem->output(
      "o", [](AttentionMergeArgs& a) -> Tensor& { return a.o; }, bar);
  if (args.lse.present())
    problem->output(
        "lse", [](AttentionMergeArgs& a) -> Tensor& { return a.lse; }, attention_bar(false, false, DType::f32, 0));
  problem->work = traffic(args);
  problem->work.flops = 2.0 * static_cast<double>(T * Hq * B * D);
  problem->second = [T, Hq, Hk, D, B, bar](const AttentionMergeArgs& result) {
    Memory own;
    const Tensor o = own.make(DType::f32, {T, Hq, D}), lse = own.make(DType::f32, {T, Hq});
    const PartialsView partials = partials_view(result.partials, T, Hq, D);
    const KvFormat& format = result.v_format;
    std::vector<double> real(static_cast<size_t>(T * Hq), 0);  // share of the weight on tokens, not on the sink; it scales the mean
    for (int64_t row = 0; row < T * Hq; ++row) {
      const int64_t t = row / Hq, h = row % Hq;
      double top = result.sinks.present() ? get(result.sinks, h) : kNone;
      for (int64_t b = 0; b < B; ++b)
        if (!partials.empty(t, h, b)) top = std::max(top, static_cast<double>(partials.m[partials.m_at(t, h, b)]));
      double total = result.sinks.present() ? std::exp(get(result.sinks, h) - top) : 0, tokens = 0;
      std::vector<double> sum(static_cast<size_t>(D), 0);
      for (int64_t b = 0; b < B; ++b) {
        if (partials.empty(t, h, b)) continue;
        const double weight = std::exp(static_cast<double>(partials.m[partials.m_at(t, h, b)]) - top);
        tokens += weight * static_cast<double>(partials.l[partials.l_at(t, h, b)]);
        for (int64_t d = 0; d < D; ++d)
          sum[static_cast<size_t>(d)] += weight * static_cast<double>(partials.o[partials.o_at(t, h, b, d)]);
      }
      total += tokens;
      real[static_cast<size_t>(row)] = total > 0 ? tokens / total : 0;
      for (int64_t d = 0; d < D; ++d) set(o, row * D + d, total > 0 ? sum[static_cast<size_t>(d)] / total : 0);
      set(lse, row, total > 0 ? top + std::log(total) : kNone);
    }
    if (result.domain == KvDomain::original && !format.passthrough) {
      run_op(kReference, KvRotateArgs{o, o, format, true});
      for (int64_t row = 0; row < T * Hq && format.mean.present(); ++row)
        for (int64_t d = 0; d < D; ++d)
          set(o, row * D + d,
              get(o, row * D + d) +
                  real[static_cast<size_t>(row)] * get(format.mean, row % Hq / (Hq / Hk) * format.mean.stride(0) + d));
    }
    Findings findings{{"o, by formula", relative_rms(result.o, o), bar.f32}};
    if (result.lse.present()) findings.push_back({"lse, by formula", relative_rms(result.lse, lse), 1e-5});
    return findings;
  };
  return problem;
}

// More options: sinks=1, odtype, lse=1, precision=exact|fast, schedule=fastest|invariant.
std::unique_ptr<Problem> build_compressed_attention(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<CompressedAttentionArgs>>();
  Memory& memory = problem->memory();
  const AttentionSetting s = make_attention(options, memory, rng);
  CompressedAttentionArgs& args = problem->args;
  const DType type = options.dtype("odtype", s.dtype);
  args.queries = s.queries;
  args.cache = s.kv.cache;
  args.mask = s.mask;
  args.sinks = random_sinks(options, memory, rng, s.Hq);
  args.precision = options.choice("precision", "exact", {"exact", "fast"}) == "fast" ? Precision::fast : Precision::exact_scores;
  args.schedule =
      options.choice("schedule", "fastest", {"fastest", "invariant"}) == "invariant" ? Schedule::invariant : Schedule::fastest;
  args.o = memory.make(type, {s.T, s.Hq, s.kv.Dv});
  if (options.flag("lse", true)) args.lse = memory.make(DType::f32, {s.T, s.Hq});
  const bool fast = args.precision == Precision::fast && s.integer_scores, rounds = s.integer_scores || f16_products(s);
  problem->output(
      "o", [](CompressedAttentionArgs& a) -> Tensor& { return a.o; }, attention_bar(rounds, fast, type, args.o.elements()));
  if (args.lse.present())
    problem->output(
        "lse", [](CompressedAttentionArgs& a) -> Tensor& { return a.lse; }, attention_bar(rounds, fast, DType::f32, 0));
  problem->work.read_bytes = cache_bytes(s.kv.cache, s.live()) + bytes_of(s.queries.q);
  problem->work.written_bytes = bytes_of(args.o) + bytes_of(args.lse);
  problem->work.flops = 2 * s.pairs() * static_cast<double>(s.kv.Dk + s.kv.Dv);
  problem->second = [s, type](const CompressedAttentionArgs& result) {
    Memory own;
    const ByPartials merged = by_partials(own, s, result.queries, result.sinks, 24, PartialLayout::interleaved);
    Findings findings{
        {"o, by partials and merge", compare_rows(s, result.o, merged.o), 1e-5 + rounding(type, result.o.elements())}};
    if (result.lse.present()) findings.push_back({"lse, by partials and merge", compare_rows(s, result.lse, merged.lse), 1e-5});
    return findings;
  };
  problem->more_laws = [p = problem.get(), s](const Stream& stream, const CompressedAttentionArgs& fresh) {
    if (s.tokens.count < 2 || s.tokens.count > 15) return Findings{};
    const Image other(p->memory(), placement_of(stream));
    const CompressedAttentionArgs apart = p->placed(other);
    run_op(stream, fresh);
    for (int64_t n = 0; n < s.tokens.count; ++n)
      if (s.tokens.length(n) > 0) run_op(stream, alone(apart, s.tokens, n));
    const bool same = same_bits(fresh.o, apart.o) && (!fresh.lse.present() || same_bits(fresh.lse, apart.lse));
    return Findings{{"sequences alone get the same bits", same ? 0.0 : 1.0, 0}};
  };
  return problem;
}

}  // namespace weft::cases
