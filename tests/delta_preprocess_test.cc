// delta_gates, l2_norm and gated_rms_norm on the reference: closed forms and properties.
#include "weft/delta_preprocess.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cases/memory.h"

namespace weft {
namespace {

using cases::get;
using cases::Memory;
using cases::Rng;
using cases::set;

constexpr Stream kReference{Backend::reference};
constexpr double kUnit = 0x1p-24;  // half a unit in the last place of f32, relative

Tensor row(Memory& memory, std::initializer_list<double> values) {
  const Tensor t = memory.make(DType::f32, {1, static_cast<int64_t>(values.size())});
  int64_t i = 0;
  for (double x : values) set(t, i++, x);
  return t;
}

// g of one token, with a_log = 0 and dt_bias = 0 for every head.
std::vector<double> decays(std::initializer_list<double> a) {
  Memory memory;
  const auto heads = static_cast<int64_t>(a.size());
  DeltaGatesArgs args;
  args.a = row(memory, a);
  args.a_log = memory.make(DType::f32, {heads});
  args.dt_bias = memory.make(DType::f32, {heads});
  args.g = memory.make(DType::f32, {1, heads});
  cases::fill(args.a_log, 0);
  cases::fill(args.dt_bias, 0);
  delta_gates(kReference, args);
  EXPECT_TRUE(memory.guards_intact());
  return cases::values(args.g);
}

// log(1 + e^x) would be 0 at -30 in f32 and infinite at 100; these are softplus to 16 digits.
TEST(DeltaGates, SoftplusKeepsItsDigits) {
  const std::pair<double, double> table[] = {{-30, 9.357622968839299e-14},
                                             {-100, 3.720075976020836e-44},
                                             {-1, 0.3132616875182228},
                                             {0, 0.6931471805599453},
                                             {1, 1.3132616875182228},
                                             {10, 10.000045398899218},
                                             {20, 20.000000002061153},
                                             {21, 21},
                                             {100, 100},
                                             {1000, 1000}};
  for (const auto& [x, softplus] : table)
    EXPECT_NEAR(decays({x})[0], -softplus, kUnit * softplus + 0x1p-150) << "x = " << x;  // 2^-150: half the smallest subnormal
}

TEST(DeltaGates, FormulaPerHead) {
  Memory memory;
  Rng rng(1);
  const int64_t T = 7, Hv = 5;
  DeltaGatesArgs args;
  args.a = memory.make(DType::f32, {T, Hv});
  args.b = memory.make(DType::f32, {T, Hv});
  args.a_log = memory.make(DType::f32, {Hv});
  args.dt_bias = memory.make(DType::f32, {Hv});
  args.g = memory.make(DType::f32, {T, Hv});
  args.beta = memory.make(DType::f32, {T, Hv});
  cases::fill_normal(args.a, rng, 3);
  cases::fill_normal(args.b, rng, 3);
  cases::fill_uniform(args.a_log, rng, -3, 2.8);
  cases::fill_normal(args.dt_bias, rng);
  for (bool doubled : {false, true}) {
    args.double_beta = doubled;
    delta_gates(kReference, args);
    for (int64_t t = 0; t < T; ++t)
      for (int64_t h = 0; h < Hv; ++h) {
        const double a = get(args.a, t * Hv + h) + get(args.dt_bias, h), b = get(args.b, t * Hv + h);
        const double g = -std::exp(get(args.a_log, h)) * std::log(1 + std::exp(a));
        EXPECT_NEAR(get(args.g, t * Hv + h), g, 2 * kUnit * std::abs(g) + 1e-12);
        const double beta = (doubled ? 2 : 1) * 0.5 * (1 + std::tanh(b / 2));
        EXPECT_NEAR(get(args.beta, t * Hv + h), beta, 2 * kUnit * beta + 1e-15);
      }
  }
}

TEST(DeltaGates, PerChannelIsOneHeadPerChannel) {
  Memory memory;
  Rng rng(2);
  const int64_t T = 3, Hv = 2, K = 4;
  DeltaGatesArgs args;
  args.a = memory.make(DType::bf16, {T, Hv, K});
  args.a_log = memory.make(DType::f32, {Hv});
  args.dt_bias = memory.make(DType::f32, {Hv, K});
  args.g = memory.make(DType::f32, {T, Hv, K});
  cases::fill_normal(args.a, rng);
  cases::fill_normal(args.a_log, rng);
  cases::fill_normal(args.dt_bias, rng);
  delta_gates(kReference, args);
  DeltaGatesArgs flat = args;
  flat.a = dense(args.a.data, DType::bf16, {T, Hv * K});
  flat.dt_bias = dense(args.dt_bias.data, DType::f32, {Hv * K});
  flat.a_log = memory.make(DType::f32, {Hv * K});
  flat.g = memory.make(DType::f32, {T, Hv * K});
  for (int64_t i = 0; i < Hv * K; ++i) set(flat.a_log, i, get(args.a_log, i / K));
  delta_gates(kReference, flat);
  EXPECT_TRUE(cases::same_bits(args.g, flat.g));
}

TEST(DeltaGates, SaturatedStrengthsAndStridedInputs) {
  Memory memory;
  DeltaGatesArgs args;
  args.a = memory.make_padded(DType::f16, {3, 2}, 5);
  args.b = memory.make_padded(DType::f32, {3, 2}, 1);
  args.a_log = memory.make(DType::f32, {2});
  args.dt_bias = memory.make(DType::f32, {2});
  args.g = memory.make_padded(DType::f32, {3, 2}, 2);
  args.beta = memory.make(DType::f32, {3, 2});
  for (const Tensor& t : {args.a, args.a_log, args.dt_bias}) cases::fill(t, 0);
  const double b[] = {-1e30, 1e30, -90, 90, 0, -0.0};
  for (int64_t i = 0; i < 6; ++i) set(args.b, i / 2 * args.b.strides[0] + i % 2, b[i]);
  delta_gates(kReference, args);
  const std::vector<double> beta = cases::values(args.beta);
  EXPECT_EQ(beta[0], 0);
  EXPECT_EQ(beta[1], 1);
  EXPECT_NEAR(beta[2], 8.194012623990515e-40, 1.5e-45);
  EXPECT_EQ(beta[3], 1);
  EXPECT_EQ(beta[4], 0.5);
  EXPECT_EQ(beta[5], 0.5);
  for (double g : cases::values(args.g)) EXPECT_EQ(g, static_cast<float>(-std::log(2.0)));
  EXPECT_TRUE(std::isnan(get(args.g, 2)));  // padding
  EXPECT_TRUE(memory.guards_intact());
}

TEST(L2Norm, ThreeFourFive) {
  Memory memory;
  const Tensor x = row(memory, {3, 4}), y = memory.make(DType::f32, {1, 2});
  l2_norm(kReference, {x, y, 0.0f});
  EXPECT_EQ(get(y, 0), 0.6f);
  EXPECT_EQ(get(y, 1), 0.8f);
  l2_norm(kReference, {x, y, 11.0f});  // sqrt(25 + 11) = 6
  EXPECT_EQ(get(y, 0), 0.5);
  EXPECT_TRUE(memory.guards_intact());
}

TEST(L2Norm, ZeroRowsStayZero) {
  Memory memory;
  const Tensor x = memory.make(DType::f32, {2, 3});
  cases::fill(x, 0);
  for (float eps : {0.0f, 1e-6f}) {
    l2_norm(kReference, {x, x, eps});
    for (double value : cases::values(x)) EXPECT_EQ(value, 0);
  }
}

TEST(L2Norm, EveryRankAndStride) {
  Rng rng(3);
  for (int rank = 1; rank <= 5; ++rank)
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      Memory memory;
      const std::initializer_list<int64_t> shapes[] = {{9}, {3, 9}, {2, 3, 9}, {2, 1, 3, 9}, {2, 2, 1, 3, 9}};
      const Tensor x = memory.make_padded(dtype, shapes[rank - 1], 4), y = memory.make_padded(DType::f32, shapes[rank - 1], 1);
      cases::fill_normal(x, rng);
      l2_norm(kReference, {x, y});
      std::vector<double> in = cases::values(x), out = cases::values(y);
      for (size_t r = 0; r < in.size(); r += 9) {
        double sum = 1e-6;
        for (size_t i = 0; i < 9; ++i) sum += in[r + i] * in[r + i];
        for (size_t i = 0; i < 9; ++i) EXPECT_NEAR(out[r + i], in[r + i] / std::sqrt(sum), 2 * kUnit);
      }
      l2_norm(kReference, {x, x});  // in place: the same, rounded to the dtype
      Memory other;
      const Tensor rounded = other.make_padded(dtype, shapes[rank - 1], 4);
      cases::copy(y, rounded);
      EXPECT_TRUE(cases::same_bits(x, rounded));
      EXPECT_TRUE(memory.guards_intact());
    }
}

TEST(L2Norm, EmptyTensorsAreLegal) {
  Memory memory;
  const Tensor x = memory.make(DType::f32, {0, 4}), z = memory.make(DType::f32, {4, 0});
  l2_norm(kReference, {x, x});
  l2_norm(kReference, {z, z});
}

TEST(GatedRmsNorm, ClosedForm) {
  Memory memory;
  GatedRmsNormArgs args;
  args.x = memory.make(DType::f32, {1, 1, 2});
  args.z = memory.make(DType::f32, {1, 1, 2});
  args.weight = memory.make(DType::f32, {2});
  args.y = memory.make(DType::f32, {1, 1, 2});
  args.eps = 0;
  set(args.x, 0, 1);
  set(args.x, 1, 7);  // mean square 25
  set(args.weight, 0, 2);
  set(args.weight, 1, -1);
  set(args.z, 0, 0);
  set(args.z, 1, 3);
  args.gate = Gate::sigmoid;
  gated_rms_norm(kReference, args);
  EXPECT_NEAR(get(args.y, 0), 2 * 0.2 * 0.5, 1e-8);
  EXPECT_NEAR(get(args.y, 1), -1.4 / (1 + std::exp(-3.0)), 1e-7);
  args.gate = Gate::silu;
  gated_rms_norm(kReference, args);
  EXPECT_EQ(get(args.y, 0), 0);
  EXPECT_NEAR(get(args.y, 1), -1.4 * 3 / (1 + std::exp(-3.0)), 3e-7);
  args.eps = 11;  // sqrt(25 + 11) = 6
  gated_rms_norm(kReference, args);
  EXPECT_NEAR(get(args.y, 1), -7.0 / 6 * 3 / (1 + std::exp(-3.0)), 3e-7);
}

TEST(GatedRmsNorm, ExtremeGatesStayFinite) {
  Memory memory;
  GatedRmsNormArgs args;
  args.x = memory.make(DType::f32, {1, 1, 4});
  args.z = memory.make(DType::f32, {1, 1, 4});
  args.weight = memory.make(DType::f32, {4});
  args.y = memory.make(DType::f32, {1, 1, 4});
  cases::fill(args.x, 1);
  cases::fill(args.weight, 1);
  const double z[] = {-1000, -90, 1000, 1e30};
  for (int64_t i = 0; i < 4; ++i) set(args.z, i, z[i]);
  gated_rms_norm(kReference, args);
  EXPECT_EQ(get(args.y, 0), 0);
  EXPECT_NEAR(get(args.y, 1), -90 * 8.194012623990515e-40, 1e-42);
  EXPECT_NEAR(get(args.y, 2), 1000, 1e-3);
  EXPECT_NEAR(get(args.y, 3), 1e30, 1e24);
  cases::fill(args.x, 0);  // a zero row stays zero, even without eps
  args.eps = 0;
  gated_rms_norm(kReference, args);
  for (double y : cases::values(args.y)) EXPECT_EQ(y, 0);
}

TEST(GatedRmsNorm, InPlaceOfEitherInputAndMixedTypes) {
  Memory memory;
  Rng rng(4);
  GatedRmsNormArgs args;
  args.x = memory.make_padded(DType::bf16, {3, 2, 8}, 2);
  args.z = memory.make_padded(DType::bf16, {3, 2, 8}, 1);
  args.weight = memory.make(DType::f32, {8});
  args.y = memory.make(DType::bf16, {3, 2, 8});
  cases::fill_normal(args.x, rng);
  cases::fill_normal(args.z, rng);
  cases::fill_normal(args.weight, rng);
  const Tensor x = memory.make(DType::bf16, {3, 2, 8});
  cases::copy(args.x, x);
  gated_rms_norm(kReference, args);
  const Tensor wide = memory.make(DType::f32, {3, 2, 8}), rounded = memory.make(DType::bf16, {3, 2, 8});
  GatedRmsNormArgs other = args;
  other.y = wide;
  gated_rms_norm(kReference, other);
  cases::copy(wide, rounded);
  EXPECT_TRUE(cases::same_bits(args.y, rounded));  // one rounding, at the store
  other.y = args.x;
  gated_rms_norm(kReference, other);
  EXPECT_TRUE(cases::same_bits(args.x, args.y));
  other.x = x;
  other.y = args.z;
  gated_rms_norm(kReference, other);
  EXPECT_TRUE(cases::same_bits(args.z, args.y));
  EXPECT_TRUE(memory.guards_intact());
}

TEST(GatedRmsNorm, NoTokensAreLegal) {
  Memory memory;
  const Tensor x = memory.make(DType::f32, {0, 2, 4}), weight = memory.make(DType::f32, {4});
  gated_rms_norm(kReference, {x, x, weight, x});
}

}  // namespace
}  // namespace weft
