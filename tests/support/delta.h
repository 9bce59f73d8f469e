// Problems for delta rule tests: random tokens, gates and states of one shape, with an independent recurrence to compare with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "cases/memory.h"
#include "weft/gated_delta_rule.h"

namespace weft::tests {

inline constexpr Stream kReference{Backend::reference};

// kUnit: the largest relative error of one rounding to f32. A state or output that the reference stores carries four roundings: its
// own and those of k, g and delta (see reference/gated_delta_rule.cc).
inline constexpr double kUnit = 0x1p-24;
inline constexpr double kFourRoundings = 4 * kUnit;

enum class Keys { gaussian, positive, same, alternating, one_hot };

struct DeltaOptions {
  std::vector<int64_t> lengths = {8};  // tokens of every sequence
  int64_t Hk = 1, Hv = 1, K = 16, V = 8;
  DType dtype = DType::f32;        // of q, k, v
  DType state_dtype = DType::f32;  // of both pools
  bool per_channel = false;
  double g_low = -0.5, g_high = 0, beta_low = 0, beta_high = 1;
  Keys keys = Keys::gaussian;
  HeadMap head_map = HeadMap::grouped;
  StateLayout layout = StateLayout::vk;
  int64_t spare_rows = 0;  // tokens behind the last sequence, with poisoned inputs: ops must neither read nor write them
  uint64_t seed = 1;
};

inline int64_t key_head_of(const DeltaOptions& o, int64_t hv) {
  if (o.head_map == HeadMap::tiled) return hv % o.Hk;
  int64_t hk = 0;
  while ((hk + 1) * (o.Hv / o.Hk) <= hv) ++hk;
  return hk;
}

inline void fill_rows(const Tensor& t, int64_t rows, const std::function<double(int64_t row, int64_t h, int64_t c)>& value) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < t.size(1); ++h)
      for (int64_t c = 0; c < (t.rank == 3 ? t.size(2) : 1); ++c)
        cases::set(t, r * t.strides[0] + h * t.strides[1] + c, value(r, h, c));
}

inline Tensor make_pool(cases::Memory& memory, DType dtype, int64_t slots, int64_t Hv, int64_t V, int64_t K, StateLayout layout) {
  return layout == StateLayout::vk ? memory.make(dtype, {slots, Hv, V, K}) : memory.make(dtype, {slots, Hv, K, V});
}

// Element (v, c) of the state of a slot and head.
inline double state_at(const Tensor& pool, StateLayout layout, int64_t slot, int64_t h, int64_t v, int64_t c) {
  const int64_t base = slot * pool.strides[0] + h * pool.strides[1];
  return cases::get(pool, base + (layout == StateLayout::vk ? v * pool.strides[2] + c : c * pool.strides[2] + v));
}

// Result of the rule for one head of one sequence.
struct HeadResult {
  std::vector<double> o;      // [tokens, V]
  std::vector<double> state;  // [V, K]
};

class DeltaProblem {
 public:
  explicit DeltaProblem(const DeltaOptions& wanted) : options(wanted), rng(wanted.seed) {
    const int64_t T = std::accumulate(options.lengths.begin(), options.lengths.end(), int64_t{0}), rows = T + options.spare_rows;
    const auto N = static_cast<int64_t>(options.lengths.size());
    std::vector<int64_t> bounds = {0};
    for (int64_t length : options.lengths) bounds.push_back(bounds.back() + length);
    tokens = T;
    begins = bounds;
    int64_t longest = 0;
    for (int64_t length : options.lengths) longest = std::max(longest, length);
    sequences = Sequences::packed(memory.indices(bounds), N, longest);
    q = memory.make(options.dtype, {rows, options.Hk, options.K});
    k = memory.make(options.dtype, {rows, options.Hk, options.K});
    v = memory.make(options.dtype, {rows, options.Hv, options.V});
    g = options.per_channel ? memory.make(DType::f32, {rows, options.Hv, options.K}) : memory.make(DType::f32, {rows, options.Hv});
    beta = memory.make(DType::f32, {rows, options.Hv});
    o = memory.make(DType::f32, {rows, options.Hv, options.V});
    in = make_pool(memory, options.state_dtype, N, options.Hv, options.V, options.K, options.layout);
    out = make_pool(memory, options.state_dtype, N, options.Hv, options.V, options.K, options.layout);
    fill_rows(q, T, [&](int64_t, int64_t, int64_t) { return rng.normal() / std::sqrt(static_cast<double>(options.K)); });
    fill_rows(v, T, [&](int64_t, int64_t, int64_t) { return rng.normal(); });
    fill_rows(g, T, [&](int64_t, int64_t, int64_t) { return rng.uniform(options.g_low, options.g_high); });
    fill_rows(beta, T, [&](int64_t, int64_t, int64_t) { return rng.uniform(options.beta_low, options.beta_high); });
    fill_keys();
    cases::fill_normal(in, rng, 0.3);
  }
  DeltaProblem(const DeltaProblem&) = delete;
  DeltaProblem& operator=(const DeltaProblem&) = delete;

  DeltaOptions options;
  cases::Rng rng;
  cases::Memory memory;
  int64_t tokens = 0;           // T without the spare rows
  std::vector<int64_t> begins;  // [N + 1]
  Sequences sequences;
  Tensor q, k, v, g, beta, o;
  Tensor in, out;  // pools with a slot per sequence
  std::optional<float> scale;

  GatedDeltaRulePrefillArgs prefill() const { return rule<GatedDeltaRulePrefillArgs>(); }
  GatedDeltaRuleDecodeArgs decode() const { return rule<GatedDeltaRuleDecodeArgs>(); }

  // Head hv over tokens [begin, end), from a state [V, K] (empty: zeros), by S <- S diag(e^g) (I - beta k k^T) + beta v k^T.
  HeadResult recurrence(int64_t hv, int64_t begin, int64_t end, std::vector<double> state = {}) const {
    const int64_t K = options.K, V = options.V, hk = key_head_of(options, hv);
    const double by = scale ? *scale : 1 / std::sqrt(static_cast<double>(K));
    if (state.empty()) state.assign(static_cast<size_t>(V * K), 0);
    HeadResult result;
    for (int64_t t = begin; t < end; ++t) {
      const double strength = cases::get(beta, t * beta.strides[0] + hv);
      std::vector<double> key(static_cast<size_t>(K)), decayed(static_cast<size_t>(V * K));
      for (int64_t c = 0; c < K; ++c) key[static_cast<size_t>(c)] = cases::get(k, t * k.strides[0] + hk * k.strides[1] + c);
      for (int64_t r = 0; r < V; ++r)
        for (int64_t c = 0; c < K; ++c)
          decayed[static_cast<size_t>(r * K + c)] =
              state[static_cast<size_t>(r * K + c)] *
              std::exp(cases::get(g, t * g.strides[0] + hv * g.strides[1] + (options.per_channel ? c : 0)));
      for (int64_t r = 0; r < V; ++r) {
        const double value = cases::get(v, t * v.strides[0] + hv * v.strides[1] + r);
        double along = 0, read = 0;
        for (int64_t c = 0; c < K; ++c) along += decayed[static_cast<size_t>(r * K + c)] * key[static_cast<size_t>(c)];
        for (int64_t c = 0; c < K; ++c) {
          const double kept = decayed[static_cast<size_t>(r * K + c)] - strength * along * key[static_cast<size_t>(c)];
          state[static_cast<size_t>(r * K + c)] = kept + strength * value * key[static_cast<size_t>(c)];
          read += state[static_cast<size_t>(r * K + c)] * cases::get(q, t * q.strides[0] + hk * q.strides[1] + c);
        }
        result.o.push_back(by * read);
      }
    }
    result.state = state;
    return result;
  }

  std::vector<double> initial(int64_t n, int64_t hv) const {
    std::vector<double> state;
    for (int64_t r = 0; r < options.V; ++r)
      for (int64_t c = 0; c < options.K; ++c) state.push_back(state_at(in, options.layout, n, hv, r, c));
    return state;
  }

  // Compares o of sequence n, and its states in `pool` at `slot`, with the recurrence from its initial state in `in` (or from
  // zeros). Bounds are relative to the norm over the whole sequence, per head.
  void expect_recurrence(int64_t n, const Tensor& pool, int64_t slot, bool from_zero, double o_bound, double state_bound) const {
    for (int64_t hv = 0; hv < options.Hv; ++hv) {
      const auto i = static_cast<size_t>(n);
      const HeadResult want = recurrence(hv, begins[i], begins[i + 1], from_zero ? std::vector<double>{} : initial(n, hv));
      double error = 0, norm = 0;
      for (int64_t t = begins[i]; t < begins[i + 1]; ++t)
        for (int64_t r = 0; r < options.V; ++r) {
          const double truth = want.o[static_cast<size_t>((t - begins[i]) * options.V + r)];
          error += std::pow(cases::get(o, t * o.strides[0] + hv * o.strides[1] + r) - truth, 2);
          norm += truth * truth;
        }
      EXPECT_LE(std::sqrt(error), o_bound * std::sqrt(norm)) << "o of sequence " << n << " head " << hv;
      if (!pool.present()) continue;
      error = norm = 0;
      for (int64_t r = 0; r < options.V; ++r)
        for (int64_t c = 0; c < options.K; ++c) {
          const double truth = want.state[static_cast<size_t>(r * options.K + c)];
          error += std::pow(state_at(pool, options.layout, slot, hv, r, c) - truth, 2);
          norm += truth * truth;
        }
      EXPECT_LE(std::sqrt(error), state_bound * std::sqrt(norm)) << "state of sequence " << n << " head " << hv;
    }
  }

 private:
  template <class Args>
  Args rule() const {
    Args args;
    args.q = q;
    args.k = k;
    args.v = v;
    args.gates.g = g;
    args.gates.beta = beta;
    args.o = o;
    args.scale = scale;
    args.head_map = options.head_map;
    args.sequences = sequences;
    args.states.in = in;
    args.states.out = out;
    args.states.layout = options.layout;
    return args;
  }

  void fill_keys() {
    std::vector<double> one(static_cast<size_t>(options.K));
    for (double& x : one) x = rng.normal();
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < options.Hk; ++h) {
        std::vector<double> row = one;
        double sum = 0;
        for (int64_t c = 0; c < options.K; ++c) {
          double& x = row[static_cast<size_t>(c)];
          if (options.keys == Keys::gaussian || options.keys == Keys::positive) x = rng.normal();
          if (options.keys == Keys::positive) x = x / (1 + std::exp(-x));
          if (options.keys == Keys::alternating && t % 2 == 1) x = -x;
          if (options.keys == Keys::one_hot) x = c == t % options.K ? 1 : 0;
          sum += x * x;
        }
        for (int64_t c = 0; c < options.K; ++c)
          cases::set(k, t * k.strides[0] + h * k.strides[1] + c, row[static_cast<size_t>(c)] / std::sqrt(sum));
      }
  }
};

// Rows [begin, end) of a [T, ...] tensor.
inline Tensor rows_of(Tensor t, int64_t begin, int64_t end) {
  t.data = static_cast<uint8_t*>(t.data) + begin * t.strides[0] * dtype_bytes(t.dtype);
  t.sizes[0] = end - begin;
  return t;
}

inline bool all_nan(const Tensor& t) {
  for (double x : cases::values(t))
    if (!std::isnan(x)) return false;
  return true;
}

}  // namespace weft::tests
