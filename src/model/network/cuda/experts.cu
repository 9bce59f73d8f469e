// Expert routing: chooses experts, gathers rows by expert and scatters results back. See Routing in model/network/compute.h.
#include <cfloat>

#include "cuda/runner.h"
#include "model/network/cuda/activations.h"

namespace weft::model::cuda {
namespace {

using weft::cuda::launch;

constexpr const char* kOp = "model";
constexpr int kThreads = 256;

__device__ int32_t* indices(const Tensor& t) { return static_cast<int32_t*>(t.data); }

// A warp per token: softmax, then k times the most probable of the remaining experts, the first of equal ones. A chosen expert is
// marked by a negative probability, so that the last loop finds the experts in ascending order.
__global__ void __launch_bounds__(32) choose_kernel(int64_t k, bool normalize, Tensor logits, Routing routing) {
  extern __shared__ float p[];
  const int64_t t = blockIdx.x;
  const int E = static_cast<int>(logits.sizes[1]), lane = threadIdx.x;
  const float* row = static_cast<const float*>(logits.data) + t * logits.strides[0];
  float top = -FLT_MAX, sum = 0;
  for (int e = lane; e < E; e += 32) top = fmaxf(top, row[e]);
  for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
  for (int e = lane; e < E; e += 32) {
    const float v = expf(row[e] - top);
    p[e] = isnan(v) ? 0.0f : v;
    sum += p[e];
  }
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  __syncwarp();
  for (int64_t i = 0; i < k; ++i) {
    float best = -1;
    int which = E;
    for (int e = lane; e < E; e += 32)
      if (p[e] > best) best = p[e], which = e;
    for (int m = 16; m > 0; m /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, m);
      const int other_which = __shfl_xor_sync(0xffffffffu, which, m);
      if (other > best || (other == best && other_which < which)) best = other, which = other_which;
    }
    if (lane == 0) p[which] = -2.0f - best;
    __syncwarp();
  }
  if (lane != 0) return;
  auto* weights = static_cast<float*>(routing.weights.data) + t * k;
  float of_chosen = 0;
  int64_t i = 0;
  for (int e = 0; e < E && i < k; ++e) {
    if (p[e] >= 0) continue;
    indices(routing.experts)[t * k + i] = e;
    weights[i] = (-2.0f - p[e]) / sum;
    of_chosen += weights[i++];
  }
  if (normalize)
    for (i = 0; i < k; ++i) weights[i] /= of_chosen;
}

// A block per expert: counts the rows of the experts before it, then assigns rows to its own entries in the order of tokens.
__global__ void __launch_bounds__(kThreads) sort_kernel(int64_t entries, Routing routing) {
  __shared__ int counts[kThreads / 32];
  const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t* experts = indices(routing.experts);
  int before = 0;
  for (int64_t i = threadIdx.x; i < entries; i += kThreads) before += experts[i] < expert;
  for (int m = 16; m > 0; m /= 2) before += __shfl_xor_sync(0xffffffffu, before, m);
  if (lane == 0) counts[warp] = before;
  __syncthreads();
  int next = 0;
  for (int count : counts) next += count;
  if (threadIdx.x == 0) indices(routing.first_row)[expert] = next;
  for (int64_t base = 0; base < entries; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    const bool mine = i < entries && experts[i] == expert;
    const unsigned votes = __ballot_sync(0xffffffffu, mine);
    __syncthreads();
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    int row = next + __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) row += counts[w];
      next += counts[w];
    }
    if (mine) indices(routing.rows)[i] = row;
  }
}

__global__ void __launch_bounds__(kThreads) gather_kernel(Tensor x, Routing routing, Tensor to) {
  const int64_t i = blockIdx.x, t = i / routing.rows.sizes[1];
  const int64_t words = dtype_bytes(x.dtype) / 2;  // of 16 bits
  const auto* from = static_cast<const uint16_t*>(x.data) + t * x.strides[0] * words;
  auto* row = static_cast<uint16_t*>(to.data) + indices(routing.rows)[i] * to.strides[0] * words;
  for (int64_t j = threadIdx.x; j < x.sizes[1] * words; j += kThreads) row[j] = from[j];
}

__global__ void __launch_bounds__(kThreads) scatter_kernel(Tensor from, Routing routing, Tensor x) {
  const int64_t t = blockIdx.x, k = routing.rows.sizes[1];
  float* row = static_cast<float*>(x.data) + t * x.strides[0];
  for (int64_t j = threadIdx.x; j < x.sizes[1]; j += kThreads) {
    float sum = row[j];
    for (int64_t i = 0; i < k; ++i)
      sum = fmaf(static_cast<const float*>(routing.weights.data)[t * k + i],
                 static_cast<const float*>(from.data)[indices(routing.rows)[t * k + i] * from.strides[0] + j], sum);
    row[j] = sum;
  }
}

}  // namespace

void route(const Stream& stream, int64_t k, bool normalize, const Tensor& logits, const Routing& routing) {
  const int64_t T = logits.sizes[0], E = logits.sizes[1];
  launch(kOp, stream, T, 32, static_cast<size_t>(E) * sizeof(float), choose_kernel, k, normalize, logits, routing);
  launch(kOp, stream, E + 1, kThreads, 0, sort_kernel, T * k, routing);
}

void gather(const Stream& stream, const Tensor& x, const Routing& routing, const Tensor& to) {
  launch(kOp, stream, routing.rows.elements(), kThreads, 0, gather_kernel, x, routing, to);
}

void scatter(const Stream& stream, const Tensor& from, const Routing& routing, const Tensor& x) {
  launch(kOp, stream, x.sizes[0], kThreads, 0, scatter_kernel, from, routing, x);
}

}  // namespace weft::model::cuda
