// Dense layers: correct for every dtype and shape, and the same bits for any batch, split and number of threads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cases/memory.h"
#include "cases/verify.h"
#include "common/half.h"
#include "model/network/cpu/dense.h"

namespace {

using namespace weft;
using model::DenseTask;
using model::Matrix;

using model::WeightType;

struct Problem {
  int64_t M, N, K;
  WeightType type;
  std::vector<float> x, y, exact_w;
  std::vector<uint8_t> stored;

  Problem(int64_t rows, int64_t outputs, int64_t inputs, WeightType weights, uint64_t seed = 3)
      : M(rows), N(outputs), K(inputs), type(weights) {
    cases::Rng rng(seed);
    x.resize(static_cast<size_t>(M * K));
    y.assign(static_cast<size_t>(M * N), NAN);
    exact_w.resize(static_cast<size_t>(N * K));
    for (float& v : x) v = static_cast<float>(rng.normal());
    stored.resize(static_cast<size_t>(model::weight_bytes(type, N * K)));
    if (model::is_float(type)) {
      for (size_t i = 0; i < exact_w.size(); ++i) {
        const auto v = static_cast<float>(rng.normal());
        const uint16_t half = type == WeightType::f16 ? f32_to_f16(v) : f32_to_bf16(v);
        if (type == WeightType::f32)
          std::memcpy(stored.data() + 4 * i, &v, 4);
        else
          std::memcpy(stored.data() + 2 * i, &half, 2);
      }
    } else {
      fill_blocks(rng);
    }
    model::widen(type, stored.data(), 0, N * K, exact_w.data());
  }
  // Random codes with scales near 0.05; blocks of Q6_K have theirs at the end.
  void fill_blocks(cases::Rng& rng) {
    for (uint8_t& byte : stored) byte = static_cast<uint8_t>(rng.next());
    const auto bytes = static_cast<size_t>(model::weight_layout(type).bytes);
    const bool has_minimum =
        type == WeightType::q4_1 || type == WeightType::q5_1 || type == WeightType::q4_k || type == WeightType::q5_k;
    for (size_t at = 0; at < stored.size(); at += bytes) {
      const size_t scale = at + (type == WeightType::q6_k ? bytes - 2 : 0);
      for (size_t half = scale; half < scale + (has_minimum ? 4 : 2); half += 2) {
        const uint16_t bits = f32_to_f16(0.05f * static_cast<float>(rng.normal()));
        std::memcpy(stored.data() + half, &bits, 2);
      }
    }
  }
  Matrix w() const { return {stored.data(), type, N, K}; }
  DenseTask task(bool add = false) { return {w(), x.data(), K, M, y.data(), N, add}; }
  double want(int64_t m, int64_t n) const {
    double sum = 0;
    for (int64_t k = 0; k < K; ++k)
      sum += static_cast<double>(x[static_cast<size_t>(m * K + k)]) * static_cast<double>(exact_w[static_cast<size_t>(n * K + k)]);
    return sum;
  }
  // Each of K fused multiply-adds and of the sums of lanes rounds by at most 2^-24 of a partial sum, which is at most sum |x w|.
  double tolerance(int64_t m, int64_t n) const {
    double sum = 0;
    for (int64_t k = 0; k < K; ++k)
      sum += std::abs(static_cast<double>(x[static_cast<size_t>(m * K + k)]) *
                      static_cast<double>(exact_w[static_cast<size_t>(n * K + k)]));
    return 0x1p-24 * static_cast<double>(K + 1) * sum;
  }
};

std::vector<WeightType> all_types() {
  std::vector<WeightType> types;
  for (int i = 0; i < model::kWeightTypes; ++i) types.push_back(static_cast<WeightType>(i));
  return types;
}

TEST(Dense, EveryShapeDtypeAndInstructionSet) {
  for (Isa isa : cases::usable_isas())
    for (WeightType type : all_types())
      for (auto [M, N, K] : {std::array<int64_t, 3>{1, 1, 1},
                             {1, 40, 40},
                             {2, 7, 33},
                             {3, 17, 64},
                             {5, 16, 1024},
                             {6, 30, 1025},
                             {7, 9, 2100},
                             {13, 33, 31},
                             {130, 19, 48},
                             {0, 5, 8},
                             {4, 0, 8},
                             {1, 20, 32},
                             {3, 17, 1056},
                             {1, 17, 256},
                             {2, 33, 1280},
                             {7, 5, 2304},
                             {130, 18, 512}}) {
        if (K % model::weight_layout(type).block != 0) continue;  // only whole blocks make a row
        Problem p(M, N, K, type);
        Stream stream;
        stream.isa = isa;
        const DenseTask task = p.task();
        model::dense(stream, {&task, 1});
        for (int64_t m = 0; m < M; ++m)
          for (int64_t n = 0; n < N; ++n)
            ASSERT_NEAR(p.y[static_cast<size_t>(m * N + n)], p.want(m, n), p.tolerance(m, n))
                << isa_name(isa) << " " << model::weight_name(type) << " M" << M << " N" << N << " K" << K;
      }
}

TEST(Dense, AddsToWhatIsThere) {
  Problem p(3, 20, 1500, WeightType::bf16);
  std::fill(p.y.begin(), p.y.end(), 100.0f);
  const DenseTask task = p.task(true);
  model::dense({}, {&task, 1});
  for (int64_t n = 0; n < p.N; ++n) EXPECT_NEAR(p.y[static_cast<size_t>(n)], 100 + p.want(0, n), 1e-3);
}

TEST(Dense, BitsOfARowDoNotDependOnBatchTasksOrThreads) {
  for (Isa isa : cases::usable_isas())
    for (WeightType type : all_types()) {
      Problem p(150, 53, model::is_float(type) ? 1300 : 1280, type);
      Stream stream;
      stream.isa = isa;
      stream.threads = 1;
      const DenseTask all = p.task();
      model::dense(stream, {&all, 1});
      const std::vector<float> together = p.y;
      for (int64_t step : {1, 2, 3, 4, 5, 11, 40}) {
        std::fill(p.y.begin(), p.y.end(), NAN);
        stream.threads = static_cast<int>(1 + step % 3);
        std::vector<DenseTask> tasks;
        for (int64_t m = 0; m < p.M; m += step)
          tasks.push_back({p.w(), p.x.data() + m * p.K, p.K, std::min(step, p.M - m), p.y.data() + m * p.N, p.N, false});
        model::dense(stream, tasks);
        EXPECT_EQ(p.y, together) << isa_name(isa) << " " << model::weight_name(type) << " by " << step;
      }
      // The same for each row of the weights by itself.
      std::fill(p.y.begin(), p.y.end(), NAN);
      std::vector<DenseTask> rows;
      for (int64_t n = 0; n < p.N; ++n) rows.push_back({p.w().slice(n, 1), p.x.data(), p.K, p.M, p.y.data() + n, p.N, false});
      model::dense(stream, rows);
      EXPECT_EQ(p.y, together) << isa_name(isa) << " " << model::weight_name(type);
    }
}

TEST(Dense, LeavesOtherColumnsAlone) {
  Problem p(9, 21, 70, WeightType::bf16);
  std::vector<float> wide(static_cast<size_t>(9 * 40), 7.0f);
  const DenseTask task{p.w(), p.x.data(), p.K, 9, wide.data() + 5, 40, false};
  model::dense({}, {&task, 1});
  for (size_t m = 0; m < 9; ++m)
    for (size_t c = 0; c < 40; ++c) {
      if (c < 5 || c >= 26) {
        EXPECT_EQ(wide[m * 40 + c], 7.0f) << m << " " << c;
      }
    }
}

TEST(Dense, NanStaysInItsRow) {
  Problem p(8, 24, 100, WeightType::bf16);
  p.x[3 * 100 + 17] = NAN;
  const DenseTask task = p.task();
  model::dense({}, {&task, 1});
  for (int64_t m = 0; m < 8; ++m)
    for (int64_t n = 0; n < 24; ++n) EXPECT_EQ(std::isnan(p.y[static_cast<size_t>(m * 24 + n)]), m == 3);
}

}  // namespace
