// What the cpu kernels of the gated delta rule read: addresses, strides and options, converted from the argument structs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/state_slots.h"
#include "cpu/common/rows_view.h"
#include "weft/gated_delta_rule.h"

namespace weft::cpu {

// What the decay inputs are: log decays g, decays alpha, or the raw a of which g = -exp(a_log) softplus(a + dt_bias).
enum class DecayForm { log, linear, raw };

struct GateView {
  DecayForm form = DecayForm::log;
  bool per_channel = false;
  RowsView decay;                // g, alpha or a
  const float* a_log = nullptr;  // raw
  int64_t a_log_stride = 0;
  const float* dt_bias = nullptr;  // raw
  int64_t dt_bias_stride = 0;
  RowsView strength;  // write strengths beta, or b with beta = sigmoid(b)
  bool raw_strength = false;
  float strength_factor = 1;  // 2 for double_beta
};

inline GateView gate_view(const DeltaGateInputs& gates) {
  GateView view;
  const Tensor& decay = gates.g.present() ? gates.g : gates.alpha.present() ? gates.alpha : gates.a;
  view.form = gates.g.present() ? DecayForm::log : gates.alpha.present() ? DecayForm::linear : DecayForm::raw;
  view.per_channel = decay.rank == 3;
  view.decay = rows_view(decay);
  if (view.form == DecayForm::raw) {
    view.a_log = static_cast<const float*>(gates.a_log.data);
    view.a_log_stride = gates.a_log.strides[0];
    view.dt_bias = static_cast<const float*>(gates.dt_bias.data);
    view.dt_bias_stride = gates.dt_bias.strides[0];
  }
  view.raw_strength = gates.b.present();
  view.strength = rows_view(view.raw_strength ? gates.b : gates.beta);
  view.strength_factor = view.raw_strength && gates.double_beta ? 2.0f : 1.0f;
  return view;
}

// Heads and how value heads share key heads.
struct DeltaHeads {
  int64_t Hk = 0, Hv = 0, K = 0, V = 0;
  HeadMap map = HeadMap::grouped;

  int64_t group() const { return Hv / Hk; }
  int64_t value_head(int64_t hk, int64_t j) const { return map == HeadMap::grouped ? hk * group() + j : hk + j * Hk; }
  int64_t key_head(int64_t hv) const { return map == HeadMap::grouped ? hv / group() : hv % Hk; }
};

// The tokens of a call.
struct DeltaTokens {
  RowsView q;  // data null: no outputs wanted
  RowsView k, v, o;
  GateView gates;
  DeltaHeads heads;
  float scale = 1;
  bool l2_norm = false;
};

// State matrices of a pool; a matrix is named by (slot, head).
struct StateView {
  void* data = nullptr;
  DType dtype = DType::f32;
  StateLayout layout = StateLayout::vk;
  int64_t slot = 0, head = 0;  // strides
  int64_t slots = 0;

  int64_t at(int64_t s, int64_t h) const { return s * slot + h * head; }
};

// One matrix of a pool.
struct MatrixAt {
  StateView view;
  int64_t base = 0;  // its first element
};

inline StateView state_view(const Tensor& t, StateLayout layout) {
  if (!t.present()) return {};
  return {t.data, t.dtype, layout, t.strides[0], t.strides[1], t.sizes[0]};
}

// Zeroes output columns of an inert sequence.
inline void zero_rows(const Tensor& o, TokenRange range, int64_t hv, int64_t column, int64_t columns) {
  const int64_t bytes = dtype_bytes(o.dtype);
  for (int64_t t = range.begin; t < range.end; ++t)
    std::memset(static_cast<char*>(o.data) + (t * o.strides[0] + hv * o.strides[1] + column) * bytes, 0,
                static_cast<size_t>(columns * bytes));
}

// One task of a chunk scan: tokens [begin, end) of one sequence, value heads [first_head, last_head) of a key head's group, and
// state columns (rows of V) [column, column + columns).
struct ScanTask {
  int64_t sequence_begin = 0, begin = 0, end = 0;
  int64_t hk = 0, first_head = 0, last_head = 0;
  int64_t column = 0, columns = 0;
  StateView in, out;
  int64_t in_slot = -1, out_slot = -1;  // -1: start from zeros, do not write
  bool identity = false;  // start from the identity with v = 0: gives p of the affine map S -> S p + q, a K x K matrix
  StateView checkpoints;  // slots: checkpoints of this sequence
  int64_t checkpoint_every = 0;
};

}  // namespace weft::cpu
