// Scenes for attention tests: a filled cache with queries, and the result of dense softmax over the decoded cache.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cases/memory.h"
#include "weft/compressed_attention.h"

namespace weft::tests {

inline constexpr Stream kReference{Backend::reference};
inline constexpr double kNone = -std::numeric_limits<double>::infinity();

struct SceneOptions {
  std::string recipe = "4v4";
  int64_t Hq = 4, Hk = 2, Dk = 64, Dv = 64;
  std::vector<int64_t> lengths = {37};  // tokens appended, one number per sequence
  std::vector<int64_t> queries = {1};   // query tokens, one number per sequence
  CacheKind kind = CacheKind::linear;
  int64_t capacity = 64;  // of one sequence
  int64_t pinned = 0;     // ring
  int64_t page = 16;      // paged
  bool token_major = false;
  KvLayout layout = KvLayout::rows;
  bool k_mean = false, v_mean = false;
  DType q_dtype = DType::f32, o_dtype = DType::f32;
  uint64_t seed = 1;
};

// Positions of the live tokens, oldest first.
inline std::vector<int64_t> live_positions(const SceneOptions& options, int64_t length) {
  std::vector<int64_t> live;
  for (int64_t p = 0; p < length; ++p)
    if (options.kind != CacheKind::ring || p < options.pinned || p >= length - (options.capacity - options.pinned))
      live.push_back(p);
  return live;
}

// The expected results of attention, in double; context is options.capacity.
struct Dense {
  std::vector<double> o, lse;  // [T, Hq, Dv], [T, Hq]
  std::vector<double> scores;  // [T, Hq, context], -inf where masked or beyond the live tokens
};

// A filled cache with queries. Rows of live tokens are drawn in live order, so that scenes hold the same tokens if they differ only
// in kind, layout, strides or the position of a ring. Everything that was not encoded is 0xFF bytes: NaN gains.
class Scene {
 public:
  explicit Scene(const SceneOptions& wanted) : options(wanted) {
    const KvRecipe recipe = kv_recipe(wanted.recipe, wanted.Dk, wanted.Dv, 3);
    build(recipe.k, recipe.v);
  }
  // Formats made by the test: dense rotations, other codebooks.
  Scene(const SceneOptions& wanted, const KvFormat& k, const KvFormat& v) : options(wanted) { build(k, v); }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  SceneOptions options;
  cases::Memory memory;
  KvCache cache;
  AttentionQueries queries;
  Tensor o, lse;
  int64_t T = 0;

  CompressedAttentionArgs args() const {
    CompressedAttentionArgs a;
    a.queries = queries;
    a.cache = cache;
    a.o = o;
    a.lse = lse;
    return a;
  }
  std::vector<double> run(const CompressedAttentionArgs& a) {
    compressed_attention(kReference, a);
    EXPECT_TRUE(memory.guards_intact());
    return cases::values(a.o);
  }
  Tensor make_o() { return memory.make(options.o_dtype, {T, options.Hq, options.Dv}); }
  Tensor make_scores(DType dtype = DType::f32) { return memory.make(dtype, {T, options.Hq, options.capacity}); }
  Tensor make_sinks() {
    const Tensor sinks = memory.make(DType::f32, {options.Hq});
    cases::Rng rng(77);
    cases::fill_normal(sinks, rng);
    return sinks;
  }
  AttentionPartials make_partials(PartialLayout layout, int64_t count) {
    AttentionPartials p;
    p.layout = layout;
    p.count = count;
    if (layout == PartialLayout::interleaved) {
      p.buffer = memory.make(DType::f32, {T * options.Hq * count * (options.Dv + 2)});
    } else {
      p.o = memory.make_padded(DType::f32, {T, options.Hq, count, options.Dv}, 3);
      p.m = memory.make(DType::f32, {T, options.Hq, count});
      p.l = memory.make_padded(DType::f32, {T, options.Hq, count}, 2);
    }
    return p;
  }

  // Dense softmax over rows of kv_decode in the original domain, by the formula of weft/compressed_attention.h.
  Dense dense(const CompressedAttentionArgs& a) {
    const int64_t Hq = options.Hq, Dk = options.Dk, Dv = options.Dv, R = Hq / options.Hk, context = options.capacity;
    Dense want;
    const std::vector<double> q = cases::values(queries.q);
    const double scale = a.queries.scale ? *a.queries.scale : 1 / std::sqrt(static_cast<double>(Dk));
    int64_t t = 0;
    for (size_t n = 0; n < options.lengths.size(); ++n) {
      const std::vector<int64_t> live = live_positions(options, options.lengths[n]);
      const auto L = static_cast<int64_t>(live.size());
      const Tensor k = memory.make(DType::f32, {L, options.Hk, Dk}), v = memory.make(DType::f32, {L, options.Hk, Dv});
      const KvDecodeArgs decode{cache, memory.indices(live), only(static_cast<int64_t>(n), L), KvDomain::original, k, v};
      kv_decode(kReference, decode);
      for (int64_t i = 0; i < options.queries[n]; ++i, ++t) {
        const int64_t P = a.queries.positions.present() ? static_cast<int64_t>(cases::get(a.queries.positions, t))
                                                        : options.lengths[n] - options.queries[n] + i;
        for (int64_t h = 0; h < Hq; ++h) {
          std::vector<double> s(static_cast<size_t>(std::max(context, L)), kNone);
          for (int64_t j = 0; j < L; ++j) {
            const int64_t p = live[static_cast<size_t>(j)];
            if ((a.mask.causal && p > P) || (a.mask.window && P - p >= *a.mask.window)) continue;
            double dot = 0;
            for (int64_t d = 0; d < Dk; ++d)
              dot += q[static_cast<size_t>((t * Hq + h) * Dk + d)] * cases::get(k, (j * options.Hk + h / R) * Dk + d);
            dot *= scale;
            s[static_cast<size_t>(j)] = a.mask.softcap ? *a.mask.softcap * std::tanh(dot / *a.mask.softcap) : dot;
          }
          const double sink = a.sinks.present() ? cases::get(a.sinks, h) : kNone;
          const double top = std::max(sink, *std::max_element(s.begin(), s.end()));
          double sum = sink == kNone ? 0 : std::exp(sink - top);
          std::vector<double> row(static_cast<size_t>(Dv), 0);
          for (int64_t j = 0; j < L; ++j) {
            if (s[static_cast<size_t>(j)] == kNone) continue;
            const double w = std::exp(s[static_cast<size_t>(j)] - top);
            sum += w;
            for (int64_t d = 0; d < Dv; ++d) row[static_cast<size_t>(d)] += w * cases::get(v, (j * options.Hk + h / R) * Dv + d);
          }
          for (double value : row) want.o.push_back(sum > 0 ? value / sum : 0);
          want.lse.push_back(sum > 0 ? top + std::log(sum) : kNone);
          want.scores.insert(want.scores.end(), s.begin(), s.begin() + context);
        }
      }
    }
    return want;
  }

  // Sequences of a call in which only sequence n has tokens.
  Sequences only(int64_t n, int64_t tokens) {
    std::vector<int64_t> bounds(options.lengths.size() + 1, 0);
    for (size_t i = static_cast<size_t>(n) + 1; i < bounds.size(); ++i) bounds[i] = tokens;
    return Sequences::packed(memory.indices(bounds), static_cast<int64_t>(options.lengths.size()), tokens);
  }

 private:
  KvSide make_side(const KvFormat& format, int64_t blocks, int64_t rows) {
    KvSide side;
    side.format = format;
    const auto grid = [&](DType dtype, int64_t width) {
      if (!options.token_major) return memory.make(dtype, {blocks, options.Hk, rows, width});
      Tensor t = memory.make(dtype, {blocks, rows, options.Hk, width});
      std::swap(t.sizes[1], t.sizes[2]);
      std::swap(t.strides[1], t.strides[2]);
      return t;
    };
    if (options.layout == KvLayout::tiles) {
      side.codes = memory.make(DType::u8, {blocks, options.Hk, rows / kTileTokens, tile_bytes(format)});
    } else if (format.passthrough) {
      side.codes = grid(*format.passthrough, format.head_dim);
    } else {
      side.codes = grid(DType::u8, code_bytes(format));
      side.gains = grid(format.gain_dtype, format.head_dim / format.gain_group);
    }
    return side;
  }

  void build(KvFormat k, KvFormat v) {
    const auto N = static_cast<int64_t>(options.lengths.size());
    cases::Rng rng(options.seed);
    if (options.k_mean) cases::fill_normal(k.mean = memory.make(DType::f32, {options.Hk, options.Dk}), rng);
    if (options.v_mean) cases::fill_normal(v.mean = memory.make(DType::f32, {options.Hk, options.Dv}), rng);
    cache.layout = options.layout;
    cache.kind = options.kind;
    cache.pinned = options.pinned;
    cache.lengths = memory.indices(options.lengths);
    int64_t blocks = N, rows = options.capacity;
    if (options.kind == CacheKind::paged) {  // neighbouring logical pages are 7 physical pages apart
      const int64_t pages = (options.capacity + options.page - 1) / options.page;
      rows = options.page;
      blocks = N * pages;
      while (blocks % 7 == 0) ++blocks;
      std::vector<int64_t> table;
      for (int64_t i = 0; i < N * pages; ++i) table.push_back((i * 7 + 3) % blocks);
      cache.page_table = memory.indices(table);
      cache.page_table.rank = 2;
      cache.page_table.sizes = {N, pages};
      cache.page_table.strides = {pages, 1};
    }
    cache.k = make_side(k, blocks, rows);
    cache.v = make_side(v, blocks, rows);
    for (int64_t n = 0; n < N; ++n) {
      const std::vector<int64_t> live = live_positions(options, options.lengths[static_cast<size_t>(n)]);
      const auto L = static_cast<int64_t>(live.size());
      const Tensor k_rows = memory.make(DType::f32, {L, options.Hk, options.Dk});
      const Tensor v_rows = memory.make(DType::f32, {L, options.Hk, options.Dv});
      cases::fill_normal(k_rows, rng);
      cases::fill_normal(v_rows, rng);
      kv_encode(kReference, {k_rows, v_rows, memory.indices(live), only(n, L), cache});
    }
    std::vector<int64_t> bounds = {0};
    for (int64_t count : options.queries) bounds.push_back(bounds.back() + count);
    T = bounds.back();
    queries.q = memory.make(options.q_dtype, {T, options.Hq, options.Dk});
    cases::fill_normal(queries.q, rng);
    queries.sequences = Sequences::packed(memory.indices(bounds), N, T);
    o = make_o();
    lse = memory.make(DType::f32, {T, options.Hq});
  }
};

// |got - want| / |want| over all numbers. Equal infinities count as equal; any other non-finite difference makes the error
// infinite.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double error = got.size() == want.size() ? 0 : -kNone, norm = 0;
  for (size_t i = 0; i < got.size() && i < want.size(); ++i) {
    if (got[i] == want[i] && !std::isfinite(want[i])) continue;
    const double difference = got[i] - want[i];
    error += std::isfinite(difference) ? difference * difference : -kNone;
    norm += want[i] * want[i];
  }
  return error == 0 ? 0 : std::sqrt(error / norm);
}

// Bound on an f32 output computed from rows that kv_decode rounded to f32. That rounding moves a score by at most scale |q| |k^|
// 2^-24, below 1e-6 in these scenes, and o by the same relative amount. Rounding v^ and o adds 2^-24 each.
inline constexpr double kTolerance = 2e-6;

inline void expect_close(const std::vector<double>& got, const std::vector<double>& want, double tolerance = kTolerance) {
  EXPECT_LE(relative_error(got, want), tolerance);
}

}  // namespace weft::tests
