// Row kernels between GEMMs: see activations.h. Sums are f32; results are rounded once.
#include "model/network/cuda/activations.h"

#include "cuda/runner.h"
#include "model/network/cuda/activations.cuh"

namespace weft::model::cuda {
namespace {

using weft::cuda::ceil_div;
using weft::cuda::launch_pdl;
using weft::cuda::load;
using weft::cuda::store;

constexpr const char* kOp = "model";
constexpr int kThreads = 256;
constexpr int64_t kMaxGridBlocks = 1 << 20;  // of kernels with grid-stride loops

// Begins every kernel here: all of them are launched with PDL.
__device__ void begin() {
  weft::cuda::pdl_wait();
  weft::cuda::pdl_launch_dependents();
}

// The sum over a block, returned to every thread.
__device__ float sum_block(float x) {
  __shared__ float warp_sums[32];
  x = sum_warp(x);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32;
  x = static_cast<int>(threadIdx.x % 32) < warps ? warp_sums[threadIdx.x % 32] : 0.0f;
  return sum_warp(x);
}

__global__ void embed_kernel(DeviceMatrix table, const int32_t* tokens, Tensor x) {
  begin();
  const int64_t t = blockIdx.x, token = tokens[t];
  if (token < 0 || token >= table.rows) return;
  for (int64_t j = threadIdx.x; j < table.cols; j += blockDim.x) {
    float value = load(table.data, DType::f16, token * table.cols + j);
    if (table.low) value += load(table.low, DType::f16, token * table.cols + j);
    static_cast<float*>(x.data)[t * x.strides[0] + j] = value * table.alpha;
  }
}

__global__ void rotations_kernel(const float* frequencies, float factor, Tensor positions, Tensor cosine, Tensor sine) {
  begin();
  const int64_t half = cosine.sizes[1], all = cosine.sizes[0] * half;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
    const float angle = static_cast<float>(static_cast<const int32_t*>(positions.data)[i / half]) * frequencies[i % half];
    float s = 0, c = 0;
    sincosf(angle, &s, &c);
    static_cast<float*>(cosine.data)[i] = c * factor;
    static_cast<float*>(sine.data)[i] = s * factor;
  }
}

// A block per row. A row of up to kKept * 4 * kThreads numbers stays in registers, so it is read once.
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(Tensor x, const float* weight, float eps, Tensor y) {
  begin();
  const int64_t t = blockIdx.x, size = x.sizes[1];
  const float* row = static_cast<const float*>(x.data) + t * x.strides[0];
  constexpr int kKept = 4;
  if (size % 4 == 0 && size <= kKept * 4 * kThreads && x.strides[0] % 4 == 0 && y.strides[0] % 4 == 0) {
    float values[kKept][4] = {};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int64_t j = 4 * (i * kThreads + threadIdx.x);
      if (j < size) weft::cuda::load_pack<float, 4>(row + j, values[i]);
#pragma unroll
      for (float v : values[i]) sum = fmaf(v, v, sum);
    }
    const float factor = rsqrtf(sum_block(sum) / static_cast<float>(size) + eps);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int64_t j = 4 * (i * kThreads + threadIdx.x);
      if (j >= size) break;
      float w[4], out[4];
      weft::cuda::load_pack<float, 4>(weight + j, w);
#pragma unroll
      for (int m = 0; m < 4; ++m) out[m] = values[i][m] * factor * w[m];
      weft::cuda::store4(y.data, y.dtype, t * y.strides[0] + j, out);
    }
    return;
  }
  float sum = 0;
  for (int64_t j = threadIdx.x; j < size; j += kThreads) sum = fmaf(row[j], row[j], sum);
  const float factor = rsqrtf(sum_block(sum) / static_cast<float>(size) + eps);
  for (int64_t j = threadIdx.x; j < size; j += kThreads) store(y, t * y.strides[0] + j, row[j] * factor * weight[j]);
}

struct Heads {
  Tensor heads;
  const float* weight;
};

// A warp per head. The heads of q come before those of k.
__global__ void __launch_bounds__(kThreads) norm_and_rotate_kernel(Heads q, Heads k, float eps, Tensor cosine, Tensor sine) {
  begin();
  const int64_t all = q.heads.sizes[1] + k.heads.sizes[1], item = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  const int64_t t = item / all, head = item % all, k_head = head - q.heads.sizes[1];
  if (t >= q.heads.sizes[0]) return;
  const Tensor& heads = k_head < 0 ? q.heads : k.heads;
  const float* weight = k_head < 0 ? q.weight : k.weight;
  const int lane = threadIdx.x % 32, D = static_cast<int>(heads.sizes[2]), half = static_cast<int>(cosine.sizes[1]);
  float* row = static_cast<float*>(heads.data) + t * heads.strides[0] + (k_head < 0 ? head : k_head) * heads.strides[1];
  float sum = 0;
  for (int j = lane; j < D; j += 32) sum = fmaf(row[j], row[j], sum);
  const float factor = rsqrtf(sum_warp(sum) / static_cast<float>(D) + eps);
  // One lane owns both channels of a pair, so no synchronisation is needed.
  for (int j = lane; j < half; j += 32) {
    const float c = static_cast<const float*>(cosine.data)[t * half + j], s = static_cast<const float*>(sine.data)[t * half + j];
    const float a = row[j] * factor * weight[j], b = row[j + half] * factor * weight[j + half];
    row[j] = a * c - b * s;
    row[j + half] = b * c + a * s;
  }
  for (int j = 2 * half + lane; j < D; j += 32) row[j] *= factor * weight[j];
}

__global__ void __launch_bounds__(kThreads) sigmoid_gate_kernel(Tensor x, Tensor gate, Tensor y) {
  begin();
  const int64_t heads = x.sizes[1], D = x.sizes[2], all = x.sizes[0] * heads * D;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
    const int64_t j = i % D, h = i / D % heads, t = i / D / heads;
    const float g = load(gate, t * gate.strides[0] + h * gate.strides[1] + j);
    store(y, t * y.strides[0] + h * y.strides[1] + j, load(x, t * x.strides[0] + h * x.strides[1] + j) * sigmoid(g));
  }
}

__global__ void __launch_bounds__(kThreads) swiglu_kernel(Tensor x, Tensor y, bool vectorized) {
  begin();
  const int64_t n = y.sizes[1], width = vectorized ? n / 4 : n, all = y.sizes[0] * width;
  const auto* in = static_cast<const float*>(x.data);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
    const int64_t t = i / width, from = t * x.strides[0], to = t * y.strides[0];
    if (vectorized) {
      const int64_t j = i % width * 4;
      float gate[4], up[4], out[4];
      weft::cuda::load_pack<float, 4>(in + from + j, gate);
      weft::cuda::load_pack<float, 4>(in + from + n + j, up);
#pragma unroll
      for (int m = 0; m < 4; ++m) out[m] = clamp_to_f16(swish(gate[m], up[m]) * kHiddenScale);
      weft::cuda::store4(y.data, y.dtype, to + j, out);
    } else {
      const int64_t j = i % width;
      store(y, to + j, clamp_to_f16(swish(in[from + j], in[from + n + j]) * kHiddenScale));
    }
  }
}

__global__ void __launch_bounds__(kThreads) add_gated_kernel(Tensor x, Tensor gate, Tensor y) {
  begin();
  const int64_t t = blockIdx.x;
  const float factor = sigmoid(static_cast<const float*>(gate.data)[t * gate.strides[0]]);
  float* to = static_cast<float*>(y.data) + t * y.strides[0];
  for (int64_t j = threadIdx.x; j < x.sizes[1]; j += kThreads)
    to[j] = fmaf(factor, static_cast<const float*>(x.data)[t * x.strides[0] + j], to[j]);
}

__global__ void __launch_bounds__(kThreads) add_bias_kernel(Tensor x, const float* bias) {
  begin();
  float* row = static_cast<float*>(x.data) + blockIdx.x * x.strides[0];
  for (int64_t j = threadIdx.x; j < x.sizes[1]; j += kThreads) row[j] += bias[j];
}

__global__ void __launch_bounds__(kThreads)
    convert_kernel(const void* from, DType dtype, int64_t count, float scale, bool residual, __half* to) {
  begin();
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const float value = clamp_to_f16(load(from, dtype, i) * scale);
    const __half rounded = __float2half_rn(value);
    to[i] = residual ? __float2half_rn(value - __half2float(rounded)) : rounded;
  }
}

__global__ void __launch_bounds__(kThreads) split_kernel(Tensor x, Tensor split_x) {
  begin();
  const int64_t width = x.sizes[1], all = x.sizes[0] * width;
  auto* to = static_cast<__half*>(split_x.data);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
    const float value = clamp_to_f16(static_cast<const float*>(x.data)[i / width * x.strides[0] + i % width]);
    to[i] = __float2half_rn(value);
    to[all + i] = __float2half_rn(value - __half2float(to[i]));
  }
}

constexpr int kBestThreads = 1024;

__global__ void __launch_bounds__(kBestThreads) best_kernel(Tensor logits, Tensor best) {
  begin();
  __shared__ float maxima[32];
  __shared__ int columns[32];
  const float* row = static_cast<const float*>(logits.data) + blockIdx.x * logits.strides[0];
  const int size = static_cast<int>(logits.sizes[1]), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float maximum = -INFINITY;
  int column = 0x7fffffff;
  for (int j = threadIdx.x; j < size; j += kBestThreads)
    if (row[j] > maximum || (column == 0x7fffffff && !isnan(row[j]))) maximum = row[j], column = j;
  const auto merge = [&](int i) {
    const float other = __shfl_xor_sync(0xffffffffu, maximum, i);
    const int other_column = __shfl_xor_sync(0xffffffffu, column, i);
    if (other > maximum || (other == maximum && other_column < column)) maximum = other, column = other_column;
  };
  for (int i = 16; i > 0; i /= 2) merge(i);
  if (lane == 0) maxima[warp] = maximum, columns[warp] = column;
  __syncthreads();
  maximum = maxima[lane], column = columns[lane];
  for (int i = 16; i > 0; i /= 2) merge(i);
  if (threadIdx.x == 0) static_cast<int32_t*>(best.data)[blockIdx.x] = column < size ? column : 0;
}

int64_t blocks_for(int64_t items) { return std::min(ceil_div(items, kThreads), kMaxGridBlocks); }

}  // namespace

void embed(const Stream& stream, const DeviceMatrix& table, const int32_t* tokens, const Tensor& x) {
  launch_pdl(kOp, stream, x.sizes[0], kThreads, 0, embed_kernel, table, tokens, x);
}

void rotations(const Stream& stream, const float* frequencies, float factor, const Tensor& positions, const Tensor& cosine,
               const Tensor& sine) {
  launch_pdl(kOp, stream, blocks_for(cosine.sizes[0] * cosine.sizes[1]), kThreads, 0, rotations_kernel, frequencies, factor,
             positions, cosine, sine);
}

void rms_norm(const Stream& stream, const Tensor& x, const float* weight, float eps, const Tensor& y) {
  launch_pdl(kOp, stream, x.sizes[0], kThreads, 0, rms_norm_kernel, x, weight, eps, y);
}

void norm_and_rotate(const Stream& stream, const Tensor& q, const float* q_weight, const Tensor& k, const float* k_weight,
                     float eps, const Tensor& cosine, const Tensor& sine) {
  launch_pdl(kOp, stream, ceil_div(q.sizes[0] * (q.sizes[1] + k.sizes[1]), kThreads / 32), kThreads, 0, norm_and_rotate_kernel,
             Heads{q, q_weight}, Heads{k, k_weight}, eps, cosine, sine);
}

void sigmoid_gate(const Stream& stream, const Tensor& x, const Tensor& gate, const Tensor& y) {
  launch_pdl(kOp, stream, blocks_for(x.elements()), kThreads, 0, sigmoid_gate_kernel, x, gate, y);
}

void swiglu(const Stream& stream, const Tensor& x, const Tensor& y) {
  const bool vectorized = y.sizes[1] % 4 == 0 && x.strides[0] % 4 == 0 && y.strides[0] % 4 == 0;
  launch_pdl(kOp, stream, blocks_for(y.elements() / (vectorized ? 4 : 1)), kThreads, 0, swiglu_kernel, x, y, vectorized);
}

void add_gated(const Stream& stream, const Tensor& x, const Tensor& gate, const Tensor& y) {
  launch_pdl(kOp, stream, x.sizes[0], kThreads, 0, add_gated_kernel, x, gate, y);
}

void add_bias(const Stream& stream, const Tensor& x, const float* bias) {
  launch_pdl(kOp, stream, x.sizes[0], kThreads, 0, add_bias_kernel, x, bias);
}

void split(const Stream& stream, const Tensor& x, const Tensor& split_x) {
  launch_pdl(kOp, stream, blocks_for(x.elements()), kThreads, 0, split_kernel, x, split_x);
}

void best_of(const Stream& stream, const Tensor& logits, const Tensor& best) {
  launch_pdl(kOp, stream, logits.sizes[0], kBestThreads, 0, best_kernel, logits, best);
}

void convert(const Stream& stream, const void* from, DType dtype, int64_t count, float scale, bool residual, void* to) {
  launch_pdl(kOp, stream, blocks_for(count), kThreads, 0, convert_kernel, from, dtype, count, scale, residual,
             static_cast<__half*>(to));
}

}  // namespace weft::model::cuda
