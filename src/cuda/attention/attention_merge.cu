// attention_merge on cuda: a block per query row merges the row's partials in order, adds the sink and undoes V's rotation.
//
// The usual head sizes have a shorter kernel, since the merge is a good part of a decode step over a short context.
#include "cuda/attention/finish_row.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kColumns = static_cast<int>(kMaxHeadDim) / kThreads;
constexpr int kAtOnce = 16;  // splits whose o is loaded together

__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams p) {
  __shared__ float factor[kThreads], row[kMaxHeadDim], spare[kMaxHeadDim], of_warp[kWarps];
  pdl_wait();
  pdl_launch_dependents();
  int64_t item = blockIdx.x;
  const int64_t hq = item % p.Hq, i = (item /= p.Hq) % p.longest, n = item / p.longest;
  const TokenRange range = tokens_of(p.sequences, n, p.T, p.longest);
  const int64_t t = range.begin + i;
  if (t >= range.end || range.length() * p.group > p.most_rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = p.rotate.D;
  const PartialsView& in = p.in;

  float top = kMasked;
  for (int64_t b = threadIdx.x; b < p.splits; b += kThreads)
    if (!in.empty(t, hq, b)) top = fmaxf(top, in.m[in.m_at(t, hq, b)]);
  top = max_warp(top);
  if (lane == 0) of_warp[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, of_warp[w]);

  float o[kColumns] = {}, total = 0;
  for (int64_t first = 0; first < p.splits; first += kThreads) {
    const int64_t b = first + threadIdx.x;
    __syncthreads();
    // A factor of 0 marks an empty split, whose o must not be used.
    const bool some = b < p.splits && !in.empty(t, hq, b);
    const float f = some ? expf(in.m[in.m_at(t, hq, b)] - (top == kMasked ? 0.0f : top)) : 0.0f;
    factor[threadIdx.x] = f;
    const float sum = sum_warp(some ? f * in.l[in.l_at(t, hq, b)] : 0.0f);
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of_warp[w];
    const int here = static_cast<int>(p.splits - first < kThreads ? p.splits - first : kThreads);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int d = threadIdx.x + c * kThreads;
      if (d >= D) continue;
#pragma unroll 1
      for (int from = 0; from < here; from += kAtOnce) {  // loads first, used or not
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
  if (p.sinks) scale = sum.join(p.sinks[hq * p.sink_stride], 1).keep;
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
    store(p.o, p.o_dtype, t * p.o_token + hq * p.o_head + d, row[d] + (mean ? total * scale * mean[d] : 0.0f));
  if (p.lse && threadIdx.x == 0) p.lse[t * p.lse_token + hq * p.lse_head] = sum.log_sum();
}

constexpr int kMostShort = 32 * kWarps;  // splits of a row: one for each thread

// Rows of 32 E coordinates, of which a lane holds E neighbours. The warps take the splits in turn.
template <int E>
__global__ void __launch_bounds__(kThreads) merge_short_kernel(const __grid_constant__ MergeParams p) {
  __shared__ float tops[kWarps], sums[kWarps];
  __shared__ __align__(16) float rows[kWarps][32 * E];
  pdl_wait();
  pdl_launch_dependents();
  unsigned item = blockIdx.x;
  const auto heads = static_cast<unsigned>(p.Hq), longest = static_cast<unsigned>(p.longest);
  const unsigned hq = item % heads, i = (item /= heads) % longest, n = item / longest;
  const TokenRange range = tokens_of(p.sequences, n, p.T, p.longest);
  const int64_t t = range.begin + i;
  if (t >= range.end || range.length() * p.group > p.most_rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = static_cast<int>(p.splits);
  const PartialsView& in = p.in;
  const int own = warp + kWarps * lane;
  float m = kMasked, l = 0;
  if (own < count) {
    m = in.m[in.m_at(t, hq, own)];
    l = in.l[in.l_at(t, hq, own)];
    if (l == 0 || m <= in.empty_m) m = kMasked, l = 0;
  }
  const bool some = l != 0;
  float top = max_warp(m);
  if (lane == 0) tops[warp] = top;
  // Values are loaded before their factors are known; those of empty splits are never used.
  constexpr int kAtOnce = 8;
  const float* from = in.o + in.o_at(t, hq, warp, lane * E);
  const int mine = (count - warp + kWarps - 1) / kWarps;  // splits of this warp
  float value[kAtOnce][E];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float* at = from + static_cast<int64_t>(kWarps * (first + k)) * in.o_block;
#pragma unroll
      for (int e = 0; e < E; e += E < 4 ? E : 4)
        if (first + k < mine) {
          if constexpr (E == 2) {
            const float2 two = *reinterpret_cast<const float2*>(at);
            value[k][0] = two.x, value[k][1] = two.y;
          } else {
            const float4 four = *reinterpret_cast<const float4*>(at + e);
            value[k][e] = four.x, value[k][e + 1] = four.y, value[k][e + 2] = four.z, value[k][e + 3] = four.w;
          }
        }
    }
  };
  fetch(0);
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w]);
  const float factor = some ? expf(m - (top == kMasked ? 0.0f : top)) : 0.0f;
  const float sum_l = sum_warp(some ? factor * l : 0.0f);
  float o[E] = {};
#pragma unroll 1
  for (int first = 0; first < mine; first += kAtOnce) {
    if (first > 0) fetch(first);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float f = __shfl_sync(0xffffffffu, factor, first + k & 31);
      if (first + k < mine && f != 0)
#pragma unroll
        for (int e = 0; e < E; ++e) o[e] = fmaf(f, value[k][e], o[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < E; ++e) rows[warp][lane * E + e] = o[e];
  if (lane == 0) sums[warp] = sum_l;
  __syncthreads();
  if (warp > 0) return;
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w];
#pragma unroll
  for (int e = 0; e < E; ++e) {
    o[e] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) o[e] += rows[w][lane * E + e];
  }
  finish_row<E>(p, t, hq, {top, total}, o, lane);
}

bool short_fits(const MergeParams& p) {
  const PartialsView& in = p.in;
  return finish_fits(p.rotate) && p.splits <= kMostShort && in.o_four == 4 && reinterpret_cast<uintptr_t>(in.o) % 16 == 0 &&
         (in.o_block | in.o_head | in.o_token) % 4 == 0;
}

void attention_merge(const Stream& stream, const AttentionMergeArgs& args) {
  MergeParams p;
  p.T = args.o.size(0);
  p.Hq = args.o.size(1);
  p.in = partials_view(args.partials, p.T, p.Hq, args.o.size(2));
  p.splits = args.partials.count;
  p.sequences = view_of(Sequences::uniform(1));
  p.longest = p.T;
  p.group = p.Hq / args.kv_heads;
  leave_rotated(args.v_format, args.domain, p.rotate, p.mean);
  p.set_outputs(args.sinks, args.o, args.lse);
  launch_merge("attention_merge", stream, p);
}

}  // namespace

void launch_merge(const char* op, const Stream& stream, const MergeParams& params) {
  const int64_t rows = params.sequences.count * params.longest * params.Hq;
  if (!short_fits(params)) {
    launch_pdl(op, stream, rows, kThreads, 0, merge_kernel, params);
    return;
  }
  const int D = params.rotate.D;
  launch_pdl(op, stream, rows, kThreads, 0,
             D == 64    ? merge_short_kernel<2>
             : D == 128 ? merge_short_kernel<4>
                        : merge_short_kernel<8>,
             params);
}

OpEntry<AttentionMergeArgs> attention_merge_entry() { return entry<attention_merge>(kAllFloats); }

}  // namespace weft::cuda
