// A GEMM of a few short f32 rows with fused prologue (RMS norm or sigmoid gate) and epilogue (bias, SwiGLU or addition): see
// gemm.h.
//
// The latency of loads dominates such a kernel, so all loads are issued together: weights before the PDL wait, then rows, gates and
// the old outputs. A block computes 16 rows times 16 to 64 outputs (16 of both matrices of a SwiGLU). Rows are loaded as f32,
// normed or gated, and stored in shared memory as words of two f16 numbers: the rounded number and its residual. The warps split K
// into slices of 16 columns, and their sums are added in a fixed order.
#include "cuda/runner.h"
#include "model/network/cuda/activations.cuh"
#include "model/network/cuda/activations.h"
#include "model/network/cuda/gemm.h"

namespace weft::model::cuda {
namespace {

using weft::cuda::ceil_div;
using weft::cuda::FragmentA;

constexpr const char* kOp = "model";
constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 16, kDepth = 16;

struct Params {
  const __half *w, *low;
  const float *x, *norm, *gate, *bias;
  float* y;
  int64_t x_stride, gate_stride, gate_head, y_stride;
  int rows, outputs, K, head;  // head: size of a head of x, for the gate
  int column_tiles;
  float eps, alpha;
  bool add;
};

// Pitch of rows of x in words, and of rows of weights in numbers: neighbouring rows begin in different banks.
WEFT_HOST_DEVICE int row_pitch(int K) { return (K + 31) / 32 * 32 + 8; }
WEFT_HOST_DEVICE int weight_pitch(int K) { return (K + 63) / 64 * 64 + 8; }

// Shared memory: rows, then the operands of the prologue (weights of the norm, or gates), then weights. The sums of the warps reuse
// it.
struct SharedLayout {
  int rows, prologue, weights, sums;  // bytes
  WEFT_HOST_DEVICE SharedLayout(int K, bool gated, int weight_rows, int columns)
      : rows(kRows * row_pitch(K) * 4),
        prologue(gated ? rows : K * 4),
        weights(weight_rows * weight_pitch(K) * 2),
        sums(kWarps * kRows * (columns + 2) * 4) {}
  WEFT_HOST_DEVICE int bytes() const { return rows + prologue + weights > sums ? rows + prologue + weights : sums; }
};

// Loads rows of weights: `Matrices` times the columns of a block, then the same rows of `low`. Also loads the weights of the norm.
template <int Matrices, int Columns, bool Low>
__device__ void load_weights(const Params& p, __half* to, float* norm, int column) {
  const int packs = p.K / 8, pitch = weight_pitch(p.K), lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < Matrices * (Low ? 2 : 1) * Columns; row += kWarps) {
    const int of = row % (Matrices * Columns);
    const int64_t n = column + of % Columns;
    const bool in_range = n < p.outputs;
    const __half* from = (Low && row != of ? p.low : p.w) + ((in_range ? n : 0) + int64_t{of / Columns} * p.outputs) * p.K;
#pragma unroll 1
    for (int i = lane; i < packs; i += 32)
      weft::cuda::cp_async(weft::cuda::shared_address(to + row * pitch + 8 * i), from + 8 * i, in_range);
  }
  if (p.norm)
#pragma unroll 1
    for (int i = threadIdx.x; i < p.K / 4; i += kThreads)
      weft::cuda::cp_async(weft::cuda::shared_address(norm + 4 * i), p.norm + 4 * i, true);
}

// x rounded to f16 in bits 0 to 15, and the residual as f16 in bits 16 to 31.
__device__ uint32_t split_word(float x) {
  x = clamp_to_f16(x);
  const __half high = __float2half_rn(x), residual = __float2half_rn(x - __half2float(high));
  return uint32_t{__half_as_ushort(high)} | uint32_t{__half_as_ushort(residual)} << 16;
}

constexpr int kOwn = kRows / kWarps;  // rows per warp

// Loads rows and their gates. Every lane loads what the same lane reads in apply_prologue().
__device__ void load_rows(const Params& p, float* rows, float* gates, int first) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * kOwn, pitch = row_pitch(p.K);
#pragma unroll 1
  for (int i = 0; i < kOwn; ++i) {
    const int64_t t = first + row + i;
    const bool in_range = t < p.rows;
    const float* from = p.x + (in_range ? t : 0) * p.x_stride;
#pragma unroll 1
    for (int k = 4 * lane; k < p.K; k += 128)
      weft::cuda::cp_async(weft::cuda::shared_address(rows + (row + i) * pitch + k), from + k, in_range);
    if (!p.gate) continue;
    const float* gate = p.gate + (in_range ? t : 0) * p.gate_stride;
#pragma unroll 1
    for (int k = 4 * lane; k < p.K; k += 128)
      weft::cuda::cp_async(weft::cuda::shared_address(gates + (row + i) * pitch + k), gate + k / p.head * p.gate_head + k % p.head,
                           in_range);
  }
}

// Norms or gates the rows of a warp and splits them into words, in place.
__device__ void apply_prologue(const Params& p, float* rows, const float* prologue) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * kOwn, pitch = row_pitch(p.K);
  const auto four = [](const float* at) { return *reinterpret_cast<const float4*>(at); };
  float* const own = rows + row * pitch;
  float factors[kOwn] = {};
  if (p.norm) {
#pragma unroll 1
    for (int k = 4 * lane; k < p.K; k += 128)
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float4 v = four(own + i * pitch + k);
        factors[i] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) factors[i] = rsqrtf(sum_warp(factors[i]) / static_cast<float>(p.K) + p.eps);
  }
#pragma unroll 1
  for (int k = 4 * lane; k < p.K; k += 128)
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float4 v = four(own + i * pitch + k);
      if (p.norm) {
        const float4 w = four(prologue + k);
        v = {v.x * factors[i] * w.x, v.y * factors[i] * w.y, v.z * factors[i] * w.z, v.w * factors[i] * w.w};
      } else if (p.gate) {
        const float4 w = four(prologue + (row + i) * pitch + k);
        v = {v.x * sigmoid(w.x), v.y * sigmoid(w.y), v.z * sigmoid(w.z), v.w * sigmoid(w.w)};
      }
      *reinterpret_cast<uint4*>(own + i * pitch + k) = {split_word(v.x), split_word(v.y), split_word(v.z), split_word(v.w)};
    }
}

template <int Matrices, int Columns, bool Low>
__global__ void __launch_bounds__(kThreads) fused_kernel(Params p) {
  extern __shared__ uint4 shared[];
  const SharedLayout layout(p.K, p.gate, Matrices * (Low ? 2 : 1) * Columns, Matrices * Columns);
  auto* const bytes = reinterpret_cast<std::byte*>(shared);
  auto* const rows = reinterpret_cast<float*>(bytes);
  auto* const prologue = reinterpret_cast<float*>(bytes + layout.rows);
  auto* const weights = reinterpret_cast<__half*>(bytes + layout.rows + layout.prologue);
  const int column = static_cast<int>(blockIdx.x) % p.column_tiles * Columns;
  const int first = static_cast<int>(blockIdx.x) / p.column_tiles * kRows;
  load_weights<Matrices, Columns, Low>(p, weights, prologue, column);
  weft::cuda::pdl_wait();
  weft::cuda::pdl_launch_dependents();
  load_rows(p, rows, prologue, first);
  weft::cuda::cp_async_commit();
  // The outputs of this thread: their addresses, and their old values for `add`.
  constexpr int kOutputs = kRows * Columns / kThreads;
  float old[kOutputs] = {};
  float* targets[kOutputs];
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x), row = first + at / Columns, n = column + at % Columns;
    targets[i] = row < p.rows && n < p.outputs ? p.y + row * p.y_stride + n : nullptr;
    if (p.add && targets[i]) old[i] = *targets[i];
  }
  weft::cuda::cp_async_wait<0>();
  if (p.norm) __syncthreads();  // other threads loaded the weights of the norm
  apply_prologue(p, rows, prologue);
  __syncthreads();

  const auto* const words = reinterpret_cast<const uint32_t*>(rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int pitch = row_pitch(p.K), across = weight_pitch(p.K);
  constexpr int kTiles = Matrices * Columns / 8;
  float sums[kTiles][4] = {};
#pragma unroll 1
  for (int k = warp * kDepth; k < p.K; k += kWarps * kDepth) {
    FragmentA high, residual;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 pair = *reinterpret_cast<const uint2*>(words + (g + i % 2 * 8) * pitch + k + 2 * t + i / 2 * 8);
      high.x[i] = __byte_perm(pair.x, pair.y, 0x5410);
      residual.x[i] = __byte_perm(pair.x, pair.y, 0x7632);
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const auto pair_at = [&](int row, int offset) {
        return *reinterpret_cast<const uint32_t*>(weights + (row + 8 * j + g) * across + k + 2 * t + offset);
      };
      const uint32_t b0 = pair_at(0, 0), b1 = pair_at(0, 8);
      weft::cuda::multiply<__half>(sums[j], residual, b0, b1);
      if (Low) weft::cuda::multiply<__half>(sums[j], high, pair_at(Matrices * Columns, 0), pair_at(Matrices * Columns, 8));
      weft::cuda::multiply<__half>(sums[j], high, b0, b1);
    }
  }
  __syncthreads();
  constexpr int kPitch = Matrices * Columns + 2;
  auto* const warp_sums = rows;  // [kWarps][kRows][kPitch]
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2*>(warp_sums + (warp * kRows + g + 8 * i) * kPitch + 8 * j + 2 * t) = {sums[j][2 * i],
                                                                                                     sums[j][2 * i + 1]};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x), row = at / Columns, c = at % Columns;
    if (!targets[i]) continue;
    float out[Matrices];
#pragma unroll
    for (int m = 0; m < Matrices; ++m) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += warp_sums[(w * kRows + row) * kPitch + m * Columns + c];
      out[m] = p.alpha * sum + (p.bias ? p.bias[m * p.outputs + column + c] : 0.0f);
    }
    if constexpr (Matrices == 2)
      *targets[i] = clamp_to_f16(swish(out[0], out[1]) * kHiddenScale);
    else
      *targets[i] = old[i] + out[0];
  }
}

SharedLayout shared_layout(int64_t K, bool gated, bool swiglu, bool low, int columns) {
  const int outputs = (swiglu ? 2 : 1) * columns;
  return {static_cast<int>(K), gated, outputs * (low ? 2 : 1), outputs};
}

// Outputs of a block. More outputs read the rows less often, but there must be enough blocks and enough shared memory.
int columns_of(const Stream& stream, int64_t outputs, int64_t row_tiles, int64_t K, bool low) {
  constexpr int64_t kEnoughBlocks = 96;
  for (int columns : {64, 32})
    if (ceil_div(outputs, columns) * row_tiles >= kEnoughBlocks &&
        shared_layout(K, true, false, low, columns).bytes() <= weft::cuda::facts_of(stream).shared_bytes / 2)
      return columns;
  return 16;
}

}  // namespace

bool can_fuse(const Stream& stream, const Tensor& x, bool swiglu, bool low) {
  constexpr int64_t kLongestRow = 4096;
  return x.dtype == DType::f32 && x.sizes[0] <= kFusedRows && x.sizes[1] % kDepth == 0 && x.sizes[1] <= kLongestRow &&
         shared_layout(x.sizes[1], true, swiglu, low, 16).bytes() <= weft::cuda::facts_of(stream).shared_bytes &&
         weft::cuda::packs_of(x, 4);
}

void multiply_fused(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const DeviceFusion& fusion, const Tensor& y) {
  const int matrices = fusion.swiglu ? 2 : 1;
  Params p{};
  p.w = static_cast<const __half*>(w.data);
  p.low = static_cast<const __half*>(w.low);
  p.x = static_cast<const float*>(x.data);
  p.x_stride = x.strides[0];
  p.norm = fusion.norm;
  p.eps = fusion.eps;
  if (fusion.gate.present()) {
    p.gate = static_cast<const float*>(fusion.gate.data);
    p.gate_stride = fusion.gate.strides[0];
    p.gate_head = fusion.gate.strides[1];
    p.head = static_cast<int>(fusion.gate.sizes[2]);
  }
  p.bias = fusion.bias;
  p.y = static_cast<float*>(y.data);
  p.y_stride = y.strides[0];
  p.rows = static_cast<int>(x.sizes[0]);
  p.outputs = static_cast<int>(w.rows / matrices);
  p.K = static_cast<int>(w.cols);
  const int64_t row_tiles = ceil_div(p.rows, kRows);
  const int columns = fusion.swiglu ? 16 : columns_of(stream, p.outputs, row_tiles, p.K, w.low);
  p.column_tiles = static_cast<int>(ceil_div(p.outputs, columns));
  p.alpha = w.alpha;
  p.add = fusion.add;
  const auto launch = [&](auto without_low, auto with_low) {
    const auto shared = static_cast<size_t>(shared_layout(p.K, p.gate, fusion.swiglu, w.low, columns).bytes());
    weft::cuda::launch_pdl(kOp, stream, row_tiles * p.column_tiles, kThreads, shared, w.low ? with_low : without_low, p);
  };
  if (fusion.swiglu)
    launch(fused_kernel<2, 16, false>, fused_kernel<2, 16, true>);
  else if (columns == 16)
    launch(fused_kernel<1, 16, false>, fused_kernel<1, 16, true>);
  else if (columns == 32)
    launch(fused_kernel<1, 32, false>, fused_kernel<1, 32, true>);
  else
    launch(fused_kernel<1, 64, false>, fused_kernel<1, 64, true>);
}

}  // namespace weft::model::cuda
