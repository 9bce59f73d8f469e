// The gates of the delta rule on the device: the three forms of decay and the two forms of write strength.
#pragma once

#include "cuda/common/views.cuh"
#include "weft/gated_delta_rule.h"

namespace weft::cuda {

__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// Exact to a few units in the last place, with a fifth of the instructions: enough for activations of 16-bit rows.
__device__ inline float quick_sigmoid(float x) {
  float power, y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + power));
  return y;
}
__device__ inline float quick_silu(float x) { return x * quick_sigmoid(x); }
__device__ inline float log_decay(float a, float a_log, float dt_bias) { return -expf(a_log) * softplus(a + dt_bias); }

// DeltaGateInputs lowered for kernels.
struct GatesView {
  StridedView g, alpha, a, a_log, dt_bias, beta, b;
  bool double_beta = false;
};
inline GatesView view_of(const DeltaGateInputs& gates) {
  return {view_of(gates.g),       view_of(gates.alpha), view_of(gates.a), view_of(gates.a_log),
          view_of(gates.dt_bias), view_of(gates.beta),  view_of(gates.b), gates.double_beta};
}

// Natural log of the decay of channel c (0 when there is one per head).
__device__ inline float log_decay_of(const GatesView& gates, int64_t t, int64_t hv, int64_t c) {
  if (gates.g.present()) return load(gates.g, t * gates.g.strides[0] + hv * gates.g.strides[1] + c);
  if (gates.alpha.present()) return logf(load(gates.alpha, t * gates.alpha.strides[0] + hv * gates.alpha.strides[1] + c));
  return log_decay(load(gates.a, t * gates.a.strides[0] + hv * gates.a.strides[1] + c),
                   load(gates.a_log, hv * gates.a_log.strides[0]), load(gates.dt_bias, hv * gates.dt_bias.strides[0] + c));
}

__device__ inline float strength_of(const GatesView& gates, int64_t t, int64_t hv) {
  if (gates.beta.present()) return load(gates.beta, t * gates.beta.strides[0] + hv * gates.beta.strides[1]);
  return (gates.double_beta ? 2.0f : 1.0f) * sigmoid(load(gates.b, t * gates.b.strides[0] + hv * gates.b.strides[1]));
}

WEFT_HOST_DEVICE inline bool per_channel(const DeltaGateInputs& gates) {
  return gates.g.rank == 3 || gates.alpha.rank == 3 || gates.a.rank == 3;
}

WEFT_HOST_DEVICE inline int64_t key_head(int64_t hv, int64_t Hv, int64_t Hk, HeadMap map) {
  const auto few = static_cast<uint32_t>(Hk), many = static_cast<uint32_t>(Hv), head = static_cast<uint32_t>(hv);
  return map == HeadMap::grouped ? head / (many / few) : head % few;
}

}  // namespace weft::cuda
