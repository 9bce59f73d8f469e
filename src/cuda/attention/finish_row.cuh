// The end of a query row, once all of its tokens are summed: sink, normalisation, V's rotation and mean, output.
#pragma once

#include "cuda/attention/attention_partials.cuh"
#include "cuda/common/mma.cuh"

namespace weft::cuda {

// Can a warp undo the rotation with a row in its registers?
inline bool finish_fits(const RotateView& rotate) {
  return (rotate.D == 64 || rotate.D == 128 || rotate.D == 256) &&
         (rotate.rotation == Rotation::none || (rotate.rotation == Rotation::srht && rotate.base == 1));
}

// By one warp, whose lanes hold coordinates lane E + e of the sum over all tokens.
template <int E>
__device__ inline void finish_row(const MergeParams& p, int64_t t, unsigned hq, SoftmaxSum<float> sum, float (&o)[E], int lane) {
  const float total = sum.l;  // without the sink
  float scale = 1;
  if (p.sinks) scale = sum.join(p.sinks[hq * p.sink_stride], 1).keep;
  scale *= sum.inverse();
#pragma unroll
  for (int e = 0; e < E; ++e) o[e] *= scale;
  if (p.rotate.rotation != Rotation::none) {
    butterflies<E>(o, p.rotate.run, lane);
    const uint32_t signs = p.rotate.signs[lane * E / 32] >> lane * E % 32;
#pragma unroll
    for (int e = 0; e < E; ++e) o[e] *= signs >> e & 1 ? -p.rotate.scale : p.rotate.scale;
  }
  if (p.mean.data) {
    const float* mean = p.mean.data + hq / static_cast<unsigned>(p.group) * p.mean.head + lane * E;
#pragma unroll
    for (int e = 0; e < E; ++e) o[e] += total * scale * mean[e];
  }
  const int64_t to = t * p.o_token + hq * p.o_head + lane * E;
  if (p.o_dtype == DType::f32) {
#pragma unroll
    for (int e = 0; e < E; ++e) static_cast<float*>(p.o)[to + e] = o[e];
  } else {
    const bool bf16 = p.o_dtype == DType::bf16;
#pragma unroll
    for (int e = 0; e < E; e += 2) {
      const uint32_t pair = bf16 ? pack<__nv_bfloat16>(o[e], o[e + 1]) : pack<__half>(o[e], o[e + 1]);
      auto* at = static_cast<uint16_t*>(p.o) + to + e;
      at[0] = static_cast<uint16_t>(pair), at[1] = static_cast<uint16_t>(pair >> 16);
    }
  }
  if (p.lse && lane == 0) p.lse[t * p.lse_token + hq * p.lse_head] = sum.log_sum();
}

}  // namespace weft::cuda
