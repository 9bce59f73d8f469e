// The inputs of the gated delta rule as doubles: heads, keys, gates and states, read once per sequence.
#pragma once

#include <cmath>
#include <vector>

#include "common/conventions.h"
#include "common/sequences.h"
#include "reference/gate_math.h"
#include "reference/rows.h"
#include "weft/gated_delta_rule.h"

namespace weft::reference {

inline int64_t key_head(int64_t hv, int64_t Hv, int64_t Hk, HeadMap map) {
  return map == HeadMap::grouped ? hv / (Hv / Hk) : hv % Hk;
}

inline double to_f32(double x) { return static_cast<float>(x); }

// Tokens of a [T, H, D] tensor, or of a [T, H] one as D = 1, dense.
struct HeadRows {
  int64_t heads = 0, width = 0;
  std::vector<double> values;

  double* at(int64_t i, int64_t h) { return values.data() + (i * heads + h) * width; }
  const double* at(int64_t i, int64_t h) const { return values.data() + (i * heads + h) * width; }
};

inline HeadRows load_rows(const Tensor& t, TokenRange range) {
  HeadRows rows{t.size(1), t.rank == 3 ? t.size(2) : 1, {}};
  rows.values.resize(static_cast<size_t>(range.length() * rows.heads * rows.width));
  for (int64_t i = 0; i < range.length(); ++i)
    for (int64_t h = 0; h < rows.heads; ++h)
      for (int64_t c = 0; c < rows.width; ++c) rows.at(i, h)[c] = load(t, at(t, range.begin + i, h) + c);
  return rows;
}

// Writes rows back to tokens from `begin`.
inline void store_rows(const Tensor& t, const HeadRows& rows, TokenRange range) {
  for (int64_t i = 0; i < range.length(); ++i)
    for (int64_t h = 0; h < rows.heads; ++h)
      for (int64_t c = 0; c < rows.width; ++c) store(t, at(t, range.begin + i, h) + c, rows.at(i, h)[c]);
}

// Queries or keys, each row divided by sqrt(sum x^2 + kKeyNormEps) when asked.
inline HeadRows load_directions(const Tensor& t, TokenRange range, bool l2_norm) {
  HeadRows rows = load_rows(t, range);
  if (!l2_norm) return rows;
  for (int64_t i = 0; i < range.length(); ++i)
    for (int64_t h = 0; h < rows.heads; ++h) {
      double* row = rows.at(i, h);
      double sum = kKeyNormEps<double>;
      for (int64_t c = 0; c < rows.width; ++c) sum += row[c] * row[c];
      for (int64_t c = 0; c < rows.width; ++c) row[c] /= std::sqrt(sum);
    }
  return rows;
}

// Natural log of the decay, [tokens, Hv, 1 or K].
inline HeadRows load_log_decay(const DeltaGateInputs& gates, TokenRange range) {
  if (gates.g.present()) return load_rows(gates.g, range);
  HeadRows rows = load_rows(gates.alpha.present() ? gates.alpha : gates.a, range);
  for (int64_t i = 0; i < range.length(); ++i)
    for (int64_t h = 0; h < rows.heads; ++h)
      for (int64_t c = 0; c < rows.width; ++c) {
        double& x = rows.at(i, h)[c];
        x = gates.alpha.present()
                ? std::log(x)
                : log_decay(x, load(gates.a_log, at(gates.a_log, h)), load(gates.dt_bias, at(gates.dt_bias, h) + c));
      }
  return rows;
}

// Write strength, [tokens, Hv, 1].
inline HeadRows load_strength(const DeltaGateInputs& gates, TokenRange range) {
  if (gates.beta.present()) return load_rows(gates.beta, range);
  HeadRows rows = load_rows(gates.b, range);
  for (double& x : rows.values) x = write_strength(x, gates.double_beta);
  return rows;
}

// A state matrix S [V, K] is held transposed, element (v, c) at c * V + v: sums over K then run in independent lanes of V, which
// compilers vectorise without reordering any sum.
using State = std::vector<double>;

// The matrix of the last two dimensions of `t` that starts at element `base`.
inline State load_state(const Tensor& t, int64_t base, int64_t V, int64_t K, StateLayout layout = StateLayout::vk) {
  State state(static_cast<size_t>(V * K));
  for (int64_t c = 0; c < K; ++c)
    for (int64_t v = 0; v < V; ++v)
      state[static_cast<size_t>(c * V + v)] =
          load(t, base + (layout == StateLayout::vk ? v * t.stride(-2) + c : c * t.stride(-2) + v));
  return state;
}

inline void store_state(const Tensor& t, int64_t base, const State& state, int64_t V, int64_t K,
                        StateLayout layout = StateLayout::vk) {
  for (int64_t c = 0; c < K; ++c)
    for (int64_t v = 0; v < V; ++v)
      store(t, base + (layout == StateLayout::vk ? v * t.stride(-2) + c : c * t.stride(-2) + v),
            state[static_cast<size_t>(c * V + v)]);
}

}  // namespace weft::reference
