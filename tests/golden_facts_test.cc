// Golden files that belong to no single op: tables, signs, Hadamard matrices, and a whole layer between its projections.
#include <gtest/gtest.h>

#include <cmath>

#include "cases/golden_reader.h"
#include "cases/problem.h"

namespace weft::cases {
namespace {

TEST(GoldenFacts, OwnTables) {
  Memory memory;
  const GoldenReader file("kv_tables_weft1", memory);
  const std::vector<double> steps = file.numbers("step");
  for (int bits = 2; bits <= 8; ++bits) {
    const KvFormat format = kv_format(std::to_string(bits), 64);
    const std::vector<double> n = file.numbers("n_" + std::to_string(bits));
    const double step = steps[static_cast<size_t>(bits - 2)];
    ASSERT_TRUE(format.grid_step.has_value());
    EXPECT_EQ(static_cast<double>(*format.grid_step), step) << bits;
    ASSERT_EQ(n.size(), size_t{1} << bits);
    for (size_t i = 0; i < n.size(); ++i)
      EXPECT_NEAR(format.codebook[i], (n[i] + 0.5) * step, 1e-6) << bits << " bits, level " << i;
  }
}

TEST(GoldenFacts, Signs) {
  for (int64_t d : {80, 128, 512}) {
    Memory memory;
    const GoldenReader file("kv_signs_" + std::to_string(d), memory);
    const std::vector<int64_t> seeds = file.integers("seed");
    const std::vector<double> bits = file.numbers("bits");
    for (size_t s = 0; s < seeds.size(); ++s) {
      const SignBits signs = srht_signs(static_cast<uint64_t>(seeds[s]), d);
      for (int64_t j = 0; j < d; ++j) {
        const auto byte = static_cast<uint32_t>(bits[s * static_cast<size_t>(d / 8) + static_cast<size_t>(j / 8)]);
        EXPECT_EQ(signs[static_cast<size_t>(j / 32)] >> (j % 32) & 1, byte >> (j % 8) & 1)
            << d << " seed " << seeds[s] << " coordinate " << j;
      }
    }
  }
  for (int64_t d : {256, 512}) {
    Memory memory;
    const std::vector<double> bits = GoldenReader("kv_signs_tq_d1_" + std::to_string(d), memory).numbers("bits");
    const KvFormat format = kv_format("tq-4", d);
    for (int64_t j = 0; j < d; ++j)
      EXPECT_EQ(format.signs[static_cast<size_t>(j / 32)] >> (j % 32) & 1,
                static_cast<uint32_t>(bits[static_cast<size_t>(j / 8)]) >> (j % 8) & 1)
          << d << " " << j;
  }
}

// H_m can be read off the rotation H_m (x) H_2^k of m 2^k coordinates without signs: the unit vector of coordinate a 2^k has H_m[b,
// a] at coordinate b 2^k, up to a constant factor.
TEST(GoldenFacts, HadamardMatrices) {
  Memory memory;
  const GoldenReader file("kv_hadamard_bits", memory);
  for (int64_t m : {12, 20, 28}) {
    const std::vector<double> rows = file.numbers("h" + std::to_string(m));
    KvFormat format = kv_format("4", 2 * m);
    ASSERT_EQ(format.rotation_group, 2 * m);
    format.signs = {};
    const Tensor x = memory.make(DType::f32, {m, 1, 2 * m}), y = memory.make(DType::f32, {m, 1, 2 * m});
    fill(x, 0);
    for (int64_t a = 0; a < m; ++a) set(x, a * 2 * m + 2 * a, 1);
    run_op(kReference, KvRotateArgs{x, y, format, false});
    for (int64_t a = 0; a < m; ++a)
      for (int64_t b = 0; b < m; ++b) {
        const bool negative = static_cast<uint32_t>(rows[static_cast<size_t>(b)]) >> a & 1;
        EXPECT_NEAR(get(y, a * 2 * m + 2 * b), (negative ? -1 : 1) / std::sqrt(2.0 * static_cast<double>(m)), 1e-7)
            << m << " " << a << " " << b;
      }
  }
}

// A layer of transformers, from the results of its input projections to the input of its output projection.
TEST(GoldenFacts, WholeLayer) {
  Memory memory;
  const GoldenReader file("delta_layer", memory);
  const auto Hk = static_cast<int64_t>(file.number("Hk")), Hv = static_cast<int64_t>(file.number("Hv"));
  const auto K = static_cast<int64_t>(file.number("K")), V = static_cast<int64_t>(file.number("V"));
  const Tensor qkv = file.floats("qkv");
  const int64_t T = qkv.size(0), C = qkv.size(1);
  ASSERT_EQ(C, 2 * Hk * K + Hv * V);
  for (Backend backend : {Backend::reference, Backend::cpu}) {
    Stream stream;
    stream.backend = backend;
    ShortConvArgs conv;
    conv.x = qkv;
    conv.weight = file.floats("conv_weight");
    conv.y = memory.make(DType::f32, {T, C});
    run_op(stream, conv);
    const auto view = [&](int64_t first, int64_t heads, int64_t size) {
      Tensor t = dense(static_cast<float*>(conv.y.data) + first, DType::f32, {T, heads, size});
      t.strides[0] = C;
      return t;
    };
    GatedDeltaRulePrefillArgs rule;
    rule.q = view(0, Hk, K);
    rule.k = view(Hk * K, Hk, K);
    rule.v = view(2 * Hk * K, Hv, V);
    rule.gates.a = file.floats("a");
    rule.gates.a_log = file.floats("A_log");
    rule.gates.dt_bias = file.floats("dt_bias");
    rule.gates.b = file.floats("b");
    rule.l2_norm = true;
    rule.o = memory.make(DType::f32, {T, Hv, V});
    run_op(stream, rule);
    GatedRmsNormArgs norm{rule.o,
                          file.floats("z"),
                          file.floats("norm_weight"),
                          memory.make(DType::f32, {T, Hv, V}),
                          static_cast<float>(file.number("eps")),
                          Gate::silu};
    run_op(stream, norm);
    EXPECT_LE(relative_rms(norm.y, file.floats("y")), file.tolerance()) << backend_name(backend) << " against transformers";
    EXPECT_LE(relative_rms(norm.y, file.floats("y_float64")), backend == Backend::reference ? 1e-6 : arithmetic(T))
        << backend_name(backend) << " against numpy";
  }
}

}  // namespace
}  // namespace weft::cases
