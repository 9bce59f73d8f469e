// attention_partials and attention_merge on the reference: both layouts, any split, empty blocks, sinks, fused inverse rotation.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <numeric>

#include "common/partials.h"
#include "tests/support/attention.h"
#include "weft/compressed_attention.h"

namespace weft {
namespace {

using cases::get;
using cases::Memory;
using cases::values;
using tests::Dense;
using tests::expect_close;
using tests::kNone;
using tests::kReference;
using tests::Scene;

constexpr PartialLayout kLayouts[] = {PartialLayout::blocks, PartialLayout::interleaved};

// The partials of a scene in blocks of `block_tokens`, with `extra` blocks beyond the capacity of the cache.
AttentionPartials split(Scene& scene, const CompressedAttentionArgs& args, PartialLayout layout, int64_t block_tokens,
                        int64_t extra = 0) {
  const int64_t count = (scene.options.capacity + block_tokens - 1) / block_tokens + extra;
  const AttentionPartials partials = scene.make_partials(layout, count);
  attention_partials(kReference, {args.queries, args.cache, args.mask, block_tokens, partials});
  EXPECT_TRUE(scene.memory.guards_intact());
  return partials;
}

// Arguments that merge `partials` into new outputs.
AttentionMergeArgs merging(Scene& scene, const AttentionPartials& partials, const Tensor& sinks = {}) {
  AttentionMergeArgs merge;
  merge.partials = partials;
  merge.v_format = scene.cache.v.format;
  merge.sinks = sinks;
  merge.kv_heads = scene.options.Hk;
  merge.o = scene.make_o();
  merge.lse = scene.memory.make(DType::f32, {scene.T, scene.options.Hq});
  return merge;
}

// Reads and writes the numbers of a partial by the offsets of weft/compressed_attention.h, not by the code under test.
struct Reader {
  const AttentionPartials& p;
  int64_t Hq, Dv, rows;

  Reader(const Scene& scene, const AttentionPartials& partials)
      : p(partials), Hq(scene.options.Hq), Dv(scene.options.Dv), rows(scene.T * scene.options.Hq) {}
  bool blocks() const { return p.layout == PartialLayout::blocks; }
  static int64_t offset(const Tensor& t, int64_t i, int64_t j, int64_t k, int64_t l = 0) {
    return i * t.strides[0] + j * t.strides[1] + k * t.strides[2] + (t.rank > 3 ? l : 0);
  }
  int64_t o_offset(int64_t r, int64_t b, int64_t j) const {
    return blocks() ? offset(p.o, r / Hq, r % Hq, b, j) : 4 * (r * Dv / 4 * p.count + j / 4 * p.count + b) + j % 4;
  }
  double o(int64_t r, int64_t b, int64_t j) const { return get(blocks() ? p.o : p.buffer, o_offset(r, b, j)); }
  double l(int64_t r, int64_t b) const {
    return blocks() ? get(p.l, offset(p.l, r / Hq, r % Hq, b)) : get(p.buffer, rows * Dv * p.count + 2 * (r * p.count + b));
  }
  double m(int64_t r, int64_t b) const {
    return blocks() ? get(p.m, offset(p.m, r / Hq, r % Hq, b)) : get(p.buffer, rows * Dv * p.count + 2 * (r * p.count + b) + 1);
  }
  void set(int64_t r, int64_t b, double o_value, double m_value, double l_value) const {
    for (int64_t j = 0; j < Dv; ++j) cases::set(blocks() ? p.o : p.buffer, o_offset(r, b, j), o_value);
    if (blocks()) {
      cases::set(p.m, offset(p.m, r / Hq, r % Hq, b), m_value);
      cases::set(p.l, offset(p.l, r / Hq, r % Hq, b), l_value);
    } else {
      cases::set(p.buffer, rows * Dv * p.count + 2 * (r * p.count + b), l_value);
      cases::set(p.buffer, rows * Dv * p.count + 2 * (r * p.count + b) + 1, m_value);
    }
  }
};

TEST(AttentionPartials, AreTheSumsOfTheirBlocks) {
  for (PartialLayout layout : kLayouts) {
    Scene scene({.Dk = 24, .Dv = 64, .lengths = {37, 9}, .queries = {2, 1}, .k_mean = true});
    CompressedAttentionArgs args = scene.args();
    args.mask.window = 30;
    const AttentionPartials partials = split(scene, args, layout, 10);
    const Reader read(scene, partials);
    const Dense want = scene.dense(args);
    const Tensor v = scene.memory.make(DType::f32, {37, 2, 64});  // rotated rows of both sequences, one after the other
    for (int64_t r = 0; r < scene.T * 4; ++r) {
      const int64_t n = r / 4 >= 2;
      std::vector<int64_t> positions(n ? 9 : 37);
      std::iota(positions.begin(), positions.end(), 0);
      kv_decode(kReference, {scene.cache,
                             scene.memory.indices(positions),
                             scene.only(n, n ? 9 : 37),
                             KvDomain::rotated,
                             {},
                             n ? dense(v.data, DType::f32, {9, 2, 64}) : v});
      for (int64_t b = 0; b < partials.count; ++b) {
        double m = kNone, l = 0;
        std::vector<double> o(64, 0);
        for (int64_t j = 10 * b; j < std::min<int64_t>(10 * b + 10, 64); ++j)
          m = std::max(m, want.scores[static_cast<size_t>(r * 64 + j)]);
        for (int64_t j = 10 * b; j < std::min<int64_t>(10 * b + 10, 64); ++j) {
          const double s = want.scores[static_cast<size_t>(r * 64 + j)];
          if (s == kNone) continue;
          l += std::exp(s - m);
          for (int64_t d = 0; d < 64; ++d) o[static_cast<size_t>(d)] += std::exp(s - m) * get(v, (j * 2 + r % 4 / 2) * 64 + d);
        }
        if (l == 0) {  // exactly the identity
          EXPECT_EQ(read.m(r, b), kNone);
          EXPECT_EQ(read.l(r, b), 0);
        } else {
          EXPECT_NEAR(read.m(r, b), m, 1e-6 * std::max(1.0, std::abs(m)));
          EXPECT_NEAR(read.l(r, b), l, 2e-6 * l);
        }
        std::vector<double> got(64);
        for (int64_t d = 0; d < 64; ++d) got[static_cast<size_t>(d)] = read.o(r, b, d);
        expect_close(got, o, 4e-6);
      }
    }
  }
}

TEST(AttentionMerge, PartialsAndMergeAreTheSingleCall) {
  for (PartialLayout layout : kLayouts)
    for (int64_t block_tokens : {1, 7, 16, 64, 1000}) {
      SCOPED_TRACE(block_tokens);
      Scene scene({.recipe = "8v4", .lengths = {37, 0, 64}, .queries = {3, 1, 2}, .k_mean = true, .v_mean = true});
      CompressedAttentionArgs args = scene.args();
      args.sinks = scene.make_sinks();
      args.mask.softcap = 5.0f;
      const std::vector<double> want = scene.run(args);
      const AttentionMergeArgs merge = merging(scene, split(scene, args, layout, block_tokens), args.sinks);
      attention_merge(kReference, merge);
      expect_close(values(merge.o), want, 5e-7);
      expect_close(values(merge.lse), values(scene.lse), 5e-7);
      EXPECT_TRUE(scene.memory.guards_intact());
    }
}

TEST(AttentionMerge, LargeScoresLoseNothing) {
  // Scores lie near 1000, where f32 numbers are 6e-5 apart: l and o must refer to m as it is stored.
  Scene scene({.lengths = {64}, .queries = {3}});
  cases::fill(scene.queries.q, 1);
  CompressedAttentionArgs args = scene.args();
  cases::fill(args.cache.k.format.mean = scene.memory.make(DType::f32, {2, 64}), 125);  // adds 64 * 125 / 8 to every score
  const std::vector<double> want = scene.run(args);
  for (PartialLayout layout : kLayouts) {
    const AttentionMergeArgs merge = merging(scene, split(scene, args, layout, 1));
    attention_merge(kReference, merge);
    expect_close(values(merge.o), want, 5e-7);
  }
}

TEST(AttentionMerge, EveryHeadDimAndKindOfCache) {
  const int64_t dims[] = {8, 24, 64, 80, 96, 112, 128, 192, 256, 512};
  const CacheKind kinds[] = {CacheKind::linear, CacheKind::ring, CacheKind::paged};
  for (size_t i = 0; i < std::size(dims); ++i)
    for (PartialLayout layout : kLayouts) {
      SCOPED_TRACE(dims[i]);
      const CacheKind kind = kinds[i % 3];
      Scene scene({.Dk = 16, .Dv = dims[i], .lengths = {kind == CacheKind::ring ? 70 : 19}, .kind = kind, .capacity = 32});
      const std::vector<double> want = scene.run(scene.args());
      const AttentionMergeArgs merge = merging(scene, split(scene, scene.args(), layout, 8));
      attention_merge(kReference, merge);
      expect_close(values(merge.o), want, 5e-7);
    }
}

TEST(AttentionMerge, OrderOfBlocksDoesNotMatter) {
  for (PartialLayout layout : kLayouts) {
    Scene scene({.lengths = {64}, .queries = {2}});
    const AttentionPartials forward = split(scene, scene.args(), layout, 9), shuffled = scene.make_partials(layout, forward.count);
    const Reader from(scene, forward), to(scene, shuffled);
    for (int64_t r = 0; r < scene.T * 4; ++r)
      for (int64_t b = 0; b < forward.count; ++b) {
        const int64_t c = (b * 3 + 5) % forward.count;  // a permutation of the 8 blocks
        to.set(r, c, 0, from.m(r, b), from.l(r, b));
        for (int64_t j = 0; j < 64; ++j)
          cases::set(to.blocks() ? shuffled.o : shuffled.buffer, to.o_offset(r, c, j), from.o(r, b, j));
      }
    const AttentionMergeArgs one = merging(scene, forward), other = merging(scene, shuffled);
    attention_merge(kReference, one);
    attention_merge(kReference, other);
    EXPECT_LE(cases::relative_rms(other.o, one.o), 1e-7);
    EXPECT_LE(cases::relative_rms(other.lse, one.lse), 1e-7);
  }
}

TEST(AttentionMerge, EmptyBlocksAnywhere) {
  for (PartialLayout layout : kLayouts) {
    Scene scene({.lengths = {33}, .queries = {2}});
    const AttentionPartials full = split(scene, scene.args(), layout, 16);
    const AttentionPartials gaps = scene.make_partials(layout, 2 * full.count + 1);  // an empty block before, between and after
    const Reader from(scene, full), to(scene, gaps);
    std::vector<std::pair<double, double>> empties = {{kNone, 0}, {0, 0}, {NAN, 0}};
    if (layout == PartialLayout::interleaved) empties.insert(empties.end(), {{-FLT_MAX / 2, 0}, {-FLT_MAX / 2, 32}, {-FLT_MAX, 1}});
    const AttentionMergeArgs want = merging(scene, full);
    attention_merge(kReference, want);
    for (const auto& [m, l] : empties) {
      for (int64_t r = 0; r < scene.T * 4; ++r)
        for (int64_t b = 0; b < gaps.count; ++b) {
          to.set(r, b, NAN, m, l);  // the o of an empty block is not read
          if (b % 2 == 0) continue;
          to.set(r, b, 0, from.m(r, b / 2), from.l(r, b / 2));
          for (int64_t j = 0; j < 64; ++j)
            cases::set(to.blocks() ? gaps.o : gaps.buffer, to.o_offset(r, b, j), from.o(r, b / 2, j));
        }
      const AttentionMergeArgs got = merging(scene, gaps);
      attention_merge(kReference, got);
      EXPECT_TRUE(cases::same_bits(got.o, want.o));
      EXPECT_TRUE(cases::same_bits(got.lse, want.lse));
    }
  }
}

TEST(AttentionMerge, BlocksBeyondTheTokensAreWrittenAsIdentity) {
  for (PartialLayout layout : kLayouts) {
    Scene scene({.lengths = {5}, .capacity = 32});
    const AttentionPartials partials = split(scene, scene.args(), layout, 8, 3);
    const Reader read(scene, partials);
    for (int64_t r = 0; r < 4; ++r)
      for (int64_t b = 1; b < 7; ++b) {
        EXPECT_EQ(read.m(r, b), kNone);
        EXPECT_EQ(read.l(r, b), 0);
        for (int64_t j = 0; j < 64; ++j) EXPECT_EQ(read.o(r, b, j), 0);
      }
    const AttentionMergeArgs merge = merging(scene, partials);
    attention_merge(kReference, merge);
    expect_close(values(merge.o), scene.run(scene.args()), 5e-7);
  }
}

TEST(AttentionMerge, NoTokensAtAll) {
  for (PartialLayout layout : kLayouts) {
    Scene scene({.lengths = {0}, .v_mean = true});
    const AttentionPartials partials = split(scene, scene.args(), layout, 16);
    AttentionMergeArgs merge = merging(scene, partials);
    attention_merge(kReference, merge);
    for (double value : values(merge.o)) EXPECT_EQ(value, 0);
    for (double lse : values(merge.lse)) EXPECT_EQ(lse, kNone);
    merge.sinks = scene.make_sinks();
    attention_merge(kReference, merge);
    for (double value : values(merge.o)) EXPECT_EQ(value, 0);
    EXPECT_EQ(values(merge.lse), values(merge.sinks));
  }
}

TEST(AttentionMerge, SinksEnterOnce) {
  for (PartialLayout layout : kLayouts) {
    Scene scene({.lengths = {60}, .v_mean = true});
    CompressedAttentionArgs args = scene.args();
    args.sinks = scene.make_sinks();
    cases::fill(args.sinks, 2.5);  // large enough to change o
    const std::vector<double> want = scene.run(args);
    for (int64_t block_tokens : {1, 5, 60, 64}) {
      AttentionMergeArgs merge = merging(scene, split(scene, args, layout, block_tokens), args.sinks);
      attention_merge(kReference, merge);
      expect_close(values(merge.o), want, 5e-7);
      expect_close(values(merge.lse), values(scene.lse), 5e-7);
    }
    AttentionMergeArgs without = merging(scene, split(scene, args, layout, 16));
    attention_merge(kReference, without);
    const std::vector<double> bare = values(without.o);
    cases::fill(without.sinks = scene.make_sinks(), kNone);
    attention_merge(kReference, without);
    EXPECT_EQ(values(without.o), bare);
  }
}

TEST(AttentionMerge, FusedInverseRotationIsMergeThenRotate) {
  for (PartialLayout layout : kLayouts)
    for (int64_t Dv : {64, 80, 128, 256, 512}) {
      Scene scene({.Dk = 16, .Dv = Dv, .lengths = {19}, .queries = {2}});
      const AttentionPartials partials = split(scene, scene.args(), layout, 8);
      AttentionMergeArgs fused = merging(scene, partials), rotated = merging(scene, partials);
      rotated.domain = KvDomain::rotated;
      attention_merge(kReference, fused);
      attention_merge(kReference, rotated);
      EXPECT_GT(cases::relative_rms(rotated.o, fused.o), 0.1);
      kv_rotate(kReference, {rotated.o, rotated.o, scene.cache.v.format, true});
      EXPECT_LE(cases::relative_rms(rotated.o, fused.o), 1e-7);
      EXPECT_TRUE(cases::same_bits(rotated.lse, fused.lse));
    }
}

TEST(AttentionMerge, RotatedOutputLeavesTheMeanOut) {
  Scene scene({.recipe = "4v4", .queries = {2}});
  const AttentionPartials partials = split(scene, scene.args(), PartialLayout::blocks, 16);
  AttentionMergeArgs plain = merging(scene, partials), mean = merging(scene, partials);
  plain.domain = mean.domain = KvDomain::rotated;
  mean.v_format.mean = scene.memory.make(DType::f32, {2, 64});
  cases::fill(mean.v_format.mean, 5);
  attention_merge(kReference, plain);
  attention_merge(kReference, mean);
  EXPECT_TRUE(cases::same_bits(plain.o, mean.o));
}

TEST(AttentionMerge, HandMadeInterleavedBuffer) {
  // One row, two blocks, Dv = 8, no rotation: (o, m, l) = (j, 0, 1) and (10 j, ln 3, 1), so o = (j + 30 j) / 4.
  Memory memory;
  AttentionMergeArgs merge;
  merge.v_format = kv_format("f32", 8);
  merge.partials.layout = PartialLayout::interleaved;
  merge.partials.count = 2;
  merge.partials.buffer = memory.make(DType::f32, {20});
  const double contents[20] = {0,  1,  2,  3,
                               0,  10, 20, 30,  // coordinates 0..3 of block 0, of block 1
                               4,  5,  6,  7,
                               40, 50, 60, 70,              // coordinates 4..7
                               1,  0,  1,  std::log(3.0)};  // (l, m) of block 0, of block 1
  for (int64_t i = 0; i < 20; ++i) cases::set(merge.partials.buffer, i, contents[i]);
  merge.o = memory.make(DType::f32, {1, 1, 8});
  merge.lse = memory.make(DType::f32, {1, 1});
  attention_merge(kReference, merge);
  for (int64_t j = 0; j < 8; ++j) EXPECT_NEAR(get(merge.o, j), 31.0 * static_cast<double>(j) / 4, 1e-5);
  EXPECT_NEAR(get(merge.lse, 0), std::log(4.0), 1e-6);
}

TEST(AttentionMerge, DistantMaximaNeitherOverflowNorVanish) {
  Memory memory;
  AttentionMergeArgs merge;
  merge.v_format = kv_format("f32", 8);
  merge.partials.count = 3;
  merge.partials.o = memory.make(DType::f32, {1, 1, 3, 8});
  merge.partials.m = memory.make(DType::f32, {1, 1, 3});
  merge.partials.l = memory.make(DType::f32, {1, 1, 3});
  const double m[3] = {-2e4, 3e4, -FLT_MAX / 2};  // in layout `blocks` a very low m does not mark an empty block
  for (int64_t b = 0; b < 3; ++b) {
    cases::set(merge.partials.m, b, m[b]);
    cases::set(merge.partials.l, b, 2);
    for (int64_t j = 0; j < 8; ++j) cases::set(merge.partials.o, b * 8 + j, static_cast<double>(b + 1));
  }
  merge.o = memory.make(DType::f32, {1, 1, 8});
  merge.lse = memory.make(DType::f32, {1, 1});
  attention_merge(kReference, merge);
  for (double value : values(merge.o)) EXPECT_EQ(value, 1);  // block 1 alone: 2 / 2
  EXPECT_FLOAT_EQ(static_cast<float>(get(merge.lse, 0)), static_cast<float>(3e4 + std::log(2.0)));
  for (int64_t b = 0; b < 2; ++b) cases::set(merge.partials.l, b, 0);
  attention_merge(kReference, merge);
  for (double value : values(merge.o)) EXPECT_EQ(value, 1.5);  // block 2 alone: 3 / 2
}

TEST(AttentionMerge, InertRowsOfPartialsAreNotWritten) {
  Scene scene({.lengths = {20, 20}, .queries = {1, 1}});
  CompressedAttentionArgs args = scene.args();
  args.queries.sequences.cu_seqlens = scene.memory.indices({0, 1, 9});
  const AttentionPartials partials = scene.make_partials(PartialLayout::blocks, 4);
  cases::fill(partials.o, 99);
  attention_partials(kReference, {args.queries, args.cache, args.mask, 16, partials});
  for (int64_t h = 0; h < 4; ++h)
    for (int64_t b = 0; b < 4; ++b)
      EXPECT_EQ(get(partials.o, partials.o.strides[0] + h * partials.o.strides[1] + b * partials.o.strides[2]), 99);
  EXPECT_NE(get(partials.o, 0), 99);
}

TEST(AttentionMerge, NoRows) {
  for (PartialLayout layout : kLayouts) {
    Scene scene({.queries = {0}});
    const AttentionMergeArgs merge = merging(scene, split(scene, scene.args(), layout, 16));
    attention_merge(kReference, merge);
    EXPECT_TRUE(scene.memory.guards_intact());
  }
}

TEST(SoftmaxSum, JoinsEmptySetsWithoutNan) {
  SoftmaxSum<double> sum;
  for (const auto& [m, l] : {std::pair{kNone, 0.0}, std::pair{kNone, 1.0}, std::pair{3.0, 0.0}}) {
    const auto factors = sum.join(m, l);
    EXPECT_EQ(factors.keep, 1);
    EXPECT_EQ(factors.take, 0);
  }
  EXPECT_EQ(sum.log_sum(), kNone);
  EXPECT_EQ(sum.inverse(), 0);
  const auto first = sum.join(-4, 2);
  EXPECT_EQ(first.keep, 0);
  EXPECT_EQ(first.take, 1);
  const auto second = sum.join(-3, 1);
  EXPECT_DOUBLE_EQ(second.keep, std::exp(-1.0));
  EXPECT_DOUBLE_EQ(sum.log_sum(), std::log(2 * std::exp(-4.0) + std::exp(-3.0)));
  sum.join(NAN, 1);
  EXPECT_TRUE(std::isnan(sum.l));
}

TEST(PartialsView, InterleavedOffsetsAreTheHeaders) {
  AttentionPartials partials;
  partials.layout = PartialLayout::interleaved;
  partials.count = 3;
  const int64_t T = 2, Hq = 5, Dv = 16, rows = T * Hq;
  std::vector<float> floats(static_cast<size_t>(rows * 3 * (Dv + 2)));
  partials.buffer = dense(floats.data(), DType::f32, {static_cast<int64_t>(floats.size())});
  const PartialsView view = partials_view(partials, T, Hq, Dv);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t h = 0; h < Hq; ++h)
      for (int64_t b = 0; b < 3; ++b) {
        const int64_t r = t * Hq + h;
        for (int64_t j = 0; j < Dv; ++j) EXPECT_EQ(view.o_at(t, h, b, j), 4 * (r * Dv / 4 * 3 + j / 4 * 3 + b) + j % 4);
        EXPECT_EQ(view.l + view.l_at(t, h, b), floats.data() + rows * Dv * 3 + 2 * (r * 3 + b));
        EXPECT_EQ(view.m + view.m_at(t, h, b), floats.data() + rows * Dv * 3 + 2 * (r * 3 + b) + 1);
      }
}

}  // namespace
}  // namespace weft
