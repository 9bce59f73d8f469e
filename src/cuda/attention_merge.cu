// attention_merge on cuda: joins the partials of a row in order, adds the sink, undoes V's rotation; a block per row.
#include "cuda/attention_parts.cuh"
#include "cuda/kv_table.h"
#include "cuda/launch.cuh"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kColumns = static_cast<int>(kMaxHeadDim) / kThreads;
constexpr int kAtOnce = 16;  // blocks whose o is loaded together
constexpr float kNone = -INFINITY;

__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams p) {
  __shared__ float factor[kThreads], row[kMaxHeadDim], spare[kMaxHeadDim], part[kWarps];
  int64_t item = blockIdx.x;
  const int64_t hq = item % p.Hq, i = (item /= p.Hq) % p.longest, n = item / p.longest;
  const TokenRange range = tokens_of(p.sequences, n, p.T, p.longest);
  const int64_t t = range.begin + i;
  if (t >= range.end) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = p.rotate.D;
  const PartialsView& in = p.in;

  float top = kNone;
  for (int64_t b = threadIdx.x; b < p.count; b += kThreads)
    if (!in.empty(t, hq, b)) top = fmaxf(top, in.m[in.m_at(t, hq, b)]);
  top = max_warp(top);
  if (lane == 0) part[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, part[w]);

  float o[kColumns] = {}, total = 0;
  for (int64_t first = 0; first < p.count; first += kThreads) {
    const int64_t b = first + threadIdx.x;
    __syncthreads();
    // A factor of 0 marks an empty block, whose o is not to be read.
    const bool there = b < p.count && !in.empty(t, hq, b);
    const float f = there ? expf(in.m[in.m_at(t, hq, b)] - (top == kNone ? 0.0f : top)) : 0.0f;
    factor[threadIdx.x] = f;
    const float sum = sum_warp(there ? f * in.l[in.l_at(t, hq, b)] : 0.0f);
    if (lane == 0) part[warp] = sum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += part[w];
    const int here = static_cast<int>(p.count - first < kThreads ? p.count - first : kThreads);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int d = threadIdx.x + c * kThreads;
      if (d >= D) continue;
#pragma unroll 1
      for (int from = 0; from < here; from += kAtOnce) {  // loads first, wanted or not
        float value[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) value[e] = in.o[in.o_at(t, hq, first + min(from + e, here - 1), d)];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e)
          if (from + e < here && factor[from + e] != 0) o[c] = fmaf(factor[from + e], value[e], o[c]);
      }
    }
  }
  SoftmaxSum<float> sum{top, total};
  float scale = 1;
  if (p.sinks.present()) scale = sum.join(load(p.sinks, hq * p.sinks.strides[0]), 1).keep;
  scale *= sum.inverse();
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (const int d = threadIdx.x + c * kThreads; d < D) row[d] = o[c] * scale;
  __syncthreads();
  if (p.rotate.rotation != Rotation::none) {
    if (warp == 0) rotate_row(p.rotate, true, row, spare, lane);
    __syncthreads();
  }
  const float* mean = p.mean.data ? p.mean.data + hq / p.group * p.mean.head : nullptr;
  for (int d = threadIdx.x; d < D; d += kThreads)
    store(p.o, t * p.o.strides[0] + hq * p.o.strides[1] + d, row[d] + (mean ? total * scale * mean[d] : 0.0f));
  if (p.lse.present() && threadIdx.x == 0) store(p.lse, t * p.lse.strides[0] + hq * p.lse.strides[1], sum.log_sum());
}

void attention_merge(const Stream& stream, const AttentionMergeArgs& args, Scratch) {
  MergeParams p;
  p.T = args.o.size(0);
  p.Hq = args.o.size(1);
  p.in = partials_view(args.partials, p.T, p.Hq, args.o.size(2));
  p.count = args.partials.count;
  p.sequences = Sequences::uniform(1);
  p.longest = p.T;
  p.group = p.Hq / args.kv_heads;
  leave_rotated(args.v_format, args.domain, p.rotate, p.mean);
  p.sinks = args.sinks;
  p.o = args.o;
  p.lse = args.lse;
  launch_merge("attention_merge", stream, p);
}

}  // namespace

void launch_merge(const char* op, const Stream& stream, const MergeParams& params) {
  launch(op, stream, params.sequences.count * params.longest * params.Hq, kThreads, 0, merge_kernel, params);
}

OpRow<AttentionMergeArgs> attention_merge_row() { return {attention_merge, kAllFloats}; }

}  // namespace weft::cuda
