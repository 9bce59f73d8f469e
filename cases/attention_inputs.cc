// Queries over a filled cache: see attention_inputs.h.
#include "cases/attention_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/kv_index.h"

namespace weft::cases {

AttentionSetting make_attention(Options& options, Memory& memory, Rng& rng) {
  AttentionSetting s;
  s.tokens = make_tokens(options, memory, 1, 1);
  s.T = s.tokens.total;
  s.lengths = options.list("lengths");
  const int64_t context =
      options.integer("context", s.lengths.empty() ? 100 : *std::max_element(s.lengths.begin(), s.lengths.end()));
  if (s.lengths.empty()) s.lengths.assign(static_cast<size_t>(s.tokens.count), context);
  if (static_cast<int64_t>(s.lengths.size()) != s.tokens.count) throw OptionError("option lengths needs one number per sequence");
  s.dtype = options.dtype("dtype", DType::f32);
  s.kv = make_cache(options, memory, rng, s.tokens.count, context);
  fill_cache(s.kv, memory, rng, s.lengths);
  s.Hq = options.integer("Hq", 2 * s.kv.Hk, 1, 4096);
  s.integer_scores = s.kv.cache.k.format.grid_step.has_value() && !s.kv.cache.k.format.passthrough;

  s.queries.q = memory.make(s.dtype, {s.T, s.Hq, s.kv.Dk});
  // q_exponent moves the values of q far from 1; the scale compensates.
  const double size = std::ldexp(1.0, static_cast<int>(options.integer("q_exponent", 0, -60, 60)));
  fill_normal(s.queries.q, rng, size);
  s.queries.sequences = s.tokens.sequences;
  s.queries.domain = options.choice("q", "original", {"original", "rotated"}) == "rotated" ? KvDomain::rotated : KvDomain::original;
  const double scale = options.real("scale", size == 1 ? 0.0 : 1 / std::sqrt(static_cast<double>(s.kv.Dk)));
  if (scale != 0) s.queries.scale = static_cast<float>(scale / size);
  if (options.choice("positions", "last", {"last", "spread"}) == "spread") {
    std::vector<int64_t> positions(static_cast<size_t>(s.T), 0);
    for (int64_t n = 0; n < s.tokens.count; ++n)
      for (int64_t i = 0; i < s.tokens.length(n); ++i)
        positions[static_cast<size_t>(s.tokens.begin(n) + i)] =
            rng.integer(0, std::max<int64_t>(s.lengths[static_cast<size_t>(n)] - 1, 0));
    s.queries.positions = memory.indices(positions);
  }
  s.mask.causal = options.flag("causal", true);
  if (const int64_t window = options.integer("window", 0); window > 0) s.mask.window = window;
  if (const double softcap = options.real("softcap", 0); softcap > 0) s.mask.softcap = static_cast<float>(softcap);
  return s;
}

double AttentionSetting::pairs() const {
  double pairs = 0;
  for (int64_t n = 0; n < tokens.count; ++n) {
    const auto length = static_cast<double>(lengths[static_cast<size_t>(n)]), queries_here = static_cast<double>(tokens.length(n));
    const double seen = mask.causal ? std::max(length - (queries_here - 1) / 2, 0.0) : length;
    pairs += queries_here * std::min(seen, mask.window ? static_cast<double>(*mask.window) : seen);
  }
  return pairs * static_cast<double>(Hq);
}

double AttentionSetting::live() const {
  double sum = 0;
  for (int64_t length : lengths) sum += static_cast<double>(live_tokens(kv.cache, length));
  return sum;
}

Tensor decoded(Memory& memory, const AttentionSetting& s, int64_t n, bool values) {
  const KvCache& cache = s.kv.cache;
  const int64_t length = s.lengths[static_cast<size_t>(n)], live = live_tokens(cache, length);
  // Only sequence n has tokens to decode; the other sequences are empty.
  std::vector<int64_t> positions, bounds(static_cast<size_t>(s.tokens.count) + 1, 0);
  for (int64_t j = 0; j < live; ++j) positions.push_back(live_position(cache, length, j));
  for (size_t i = static_cast<size_t>(n) + 1; i < bounds.size(); ++i) bounds[i] = live;
  KvDecodeArgs args;
  args.cache = cache;
  args.positions = memory.indices(positions);
  args.sequences = Sequences::packed(memory.indices(bounds), s.tokens.count, live);
  const Tensor rows = memory.make(DType::f32, {live, s.kv.Hk, values ? s.kv.Dv : s.kv.Dk});
  (values ? args.v : args.k) = rows;
  run_op(kReference, args);
  return rows;
}

std::vector<std::vector<std::vector<double>>> direct_scores(const AttentionSetting& s, const AttentionQueries& queries) {
  Memory memory;
  Tensor q = memory.make(DType::f32, {s.T, s.Hq, s.kv.Dk});
  copy(queries.q, q);
  if (queries.domain == KvDomain::rotated) run_op(kReference, KvRotateArgs{q, q, s.kv.cache.k.format, true});
  const double scale = queries.scale ? static_cast<double>(*queries.scale) : 1 / std::sqrt(static_cast<double>(s.kv.Dk));
  std::vector<std::vector<std::vector<double>>> scores(static_cast<size_t>(s.T));
  const KvCache& cache = s.kv.cache;
  for (int64_t n = 0; n < s.tokens.count; ++n) {
    const Tensor k = decoded(memory, s, n, false);
    const int64_t length = s.lengths[static_cast<size_t>(n)], group = s.Hq / s.kv.Hk;
    for (int64_t i = 0; i < s.tokens.length(n); ++i) {
      const int64_t t = s.tokens.begin(n) + i;
      const int64_t position =
          queries.positions.present() ? static_cast<int64_t>(get(queries.positions, t)) : length - s.tokens.length(n) + i;
      for (int64_t h = 0; h < s.Hq; ++h) {
        std::vector<double> row;
        for (int64_t j = 0; j < k.size(0); ++j) {
          const int64_t p = live_position(cache, length, j);
          double score = 0;
          for (int64_t d = 0; d < s.kv.Dk; ++d)
            score += get(q, t * q.stride(0) + h * q.stride(1) + d) * get(k, j * k.stride(0) + h / group * k.stride(1) + d);
          score *= scale;
          if (s.mask.softcap) score = *s.mask.softcap * std::tanh(score / *s.mask.softcap);
          const bool seen = (!s.mask.causal || p <= position) && (!s.mask.window || p + *s.mask.window > position) &&
                            locate(cache, n, p).exists();
          row.push_back(seen ? score : -std::numeric_limits<double>::infinity());
        }
        scores[static_cast<size_t>(t)].push_back(std::move(row));
      }
    }
  }
  return scores;
}

}  // namespace weft::cases
