// GEMM kernels for few rows, any shape and experts: see gemm.h.
#include "cuda/runner.h"
#include "model/network/cuda/gemm.h"

namespace weft::model::cuda {
namespace {

using weft::cuda::ceil_div;
using weft::cuda::launch;
using weft::cuda::load_pack;

constexpr const char* kOp = "model";

// --- few rows: a warp per output ----------------------------------------------------------------------------------------------

constexpr int kFewThreads = 128;

struct Few {
  const __half *w, *x;
  float* y;
  int64_t N, K, x_stride, y_stride;
  float alpha;
  bool add;
};

template <int M>
__global__ void __launch_bounds__(kFewThreads) few_kernel(Few p, int rows) {
  const int64_t n = blockIdx.x * int64_t{kFewThreads / 32} + threadIdx.x / 32;
  if (n >= p.N) return;
  const int lane = threadIdx.x % 32;
  float sums[M] = {};
  constexpr int kAhead = 4;
  const __half* w = p.w + n * p.K;
  for (int64_t base = lane * 8; base < p.K; base += kAhead * 256) {
    uint4 raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      raw[i] = base + i * 256 < p.K ? __ldcs(reinterpret_cast<const uint4*>(w + base + i * 256)) : uint4{};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i * 256 >= p.K) break;
      const auto* pairs = reinterpret_cast<const __half2*>(&raw[i]);
      float weights[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = __half22float2(pairs[j]);
        weights[2 * j] = two.x, weights[2 * j + 1] = two.y;
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
        if (m >= rows) break;
        float x[8];
        load_pack<__half, 8>(p.x + m * p.x_stride + base + i * 256, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[m] = fmaf(weights[j], x[j], sums[m]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int i = 16; i > 0; i /= 2) sums[m] += __shfl_xor_sync(0xffffffffu, sums[m], i);
  if (lane != 0) return;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    if (m >= rows) break;
    float* y = p.y + m * p.y_stride + n;
    *y = p.add ? fmaf(p.alpha, sums[m], *y) : p.alpha * sums[m];
  }
}

// --- any shape: tiles of 64 x 64 on tensor cores --------------------------------------------------------------------------------

constexpr int kTile = 64, kDepth = 32, kPitch = kDepth + 8, kTileThreads = 128;

struct Tiles {
  const __half *w, *x;
  float* y;
  const int32_t* first_row;  // null: one matrix for all rows
  int64_t M, N, K, x_stride, y_stride, experts, row_tiles, column_tiles;
  float alpha;
  bool add, vectorized;  // vectorized: rows are aligned to 16 bytes and multiples of 16 bytes
};

// The rows [first, first + rows) of a row tile, and their expert.
struct RowTile {
  int64_t expert, first, rows;
};

// Row tile `tile`; 0 rows: there is no such tile. Called by a whole warp.
__device__ RowTile row_tile(const Tiles& p, int64_t tile) {
  if (!p.first_row) return {0, tile * kTile, min(p.M - tile * kTile, int64_t{kTile})};
  const int lane = threadIdx.x % 32;
  const int64_t each = (p.experts + 31) / 32, begin = min(lane * each, p.experts), end = min(begin + each, p.experts);
  const auto tiles_of = [&](int64_t e) { return (p.first_row[e + 1] - p.first_row[e] + kTile - 1) / kTile; };
  int own = 0;
  for (int64_t e = begin; e < end; ++e) own += tiles_of(e);
  int before = own;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, i);
    if (lane >= i) before += other;
  }
  before -= own;
  const unsigned holders = __ballot_sync(0xffffffffu, tile >= before && tile < before + own);
  if (holders == 0) return {0, 0, 0};
  const int holder = __ffs(holders) - 1;
  int expert = 0, first = 0, rows = 0;
  if (lane == holder) {
    int64_t e = begin, left = tile - before;
    while (left >= tiles_of(e)) left -= tiles_of(e++);
    expert = static_cast<int>(e);
    first = p.first_row[e] + static_cast<int>(left) * kTile;
    rows = min(p.first_row[e + 1] - first, kTile);
  }
  return {__shfl_sync(0xffffffffu, expert, holder), __shfl_sync(0xffffffffu, first, holder),
          __shfl_sync(0xffffffffu, rows, holder)};
}

// Loads [rows, kDepth] of a matrix from column k on, with zeros outside.
__device__ void load_tile(__half (*tile)[kPitch], const __half* from, int64_t stride, int64_t rows, int64_t k, int64_t K,
                          bool vectorized) {
  for (int i = threadIdx.x; i < kTile * kDepth / 8; i += kTileThreads) {
    const int row = i / (kDepth / 8), column = i % (kDepth / 8) * 8;
    uint4 raw{};
    if (row < rows && k + column < K) {
      const __half* at = from + row * stride + k + column;
      if (vectorized) {
        raw = *reinterpret_cast<const uint4*>(at);
      } else {
        auto* numbers = reinterpret_cast<__half*>(&raw);
        for (int j = 0; j < 8 && k + column + j < K; ++j) numbers[j] = at[j];
      }
    }
    *reinterpret_cast<uint4*>(&tile[row][column]) = raw;
  }
}

__device__ uint32_t pair_at(const __half* at) { return *reinterpret_cast<const uint32_t*>(at); }

__global__ void __launch_bounds__(kTileThreads) tiles_kernel(Tiles p) {
  __shared__ alignas(16) __half xs[kTile][kPitch];
  __shared__ alignas(16) __half ws[kTile][kPitch];
  const RowTile tile = row_tile(p, blockIdx.x / p.column_tiles);
  if (tile.rows <= 0) return;
  const int64_t column = blockIdx.x % p.column_tiles * kTile;
  const __half* x = p.x + tile.first * p.x_stride;
  const __half* w = p.w + (tile.expert * p.N + column) * p.K;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m0 = warp / 2 * 32, n0 = warp % 2 * 32;
  float sums[2][4][4] = {};
  for (int64_t k = 0; k < p.K; k += kDepth) {
    __syncthreads();
    load_tile(xs, x, p.x_stride, tile.rows, k, p.K, p.vectorized);
    load_tile(ws, w, p.K, p.N - column, k, p.K, p.vectorized);
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < kDepth; kk += 16) {
      uint32_t a[2][4], b[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const __half *low = &xs[m0 + 16 * i + g][kk + 2 * t], *high = &xs[m0 + 16 * i + g + 8][kk + 2 * t];
        a[i][0] = pair_at(low), a[i][1] = pair_at(high), a[i][2] = pair_at(low + 8), a[i][3] = pair_at(high + 8);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const __half* at = &ws[n0 + 8 * j + g][kk + 2 * t];
        b[j][0] = pair_at(at), b[j][1] = pair_at(at + 8);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
              : "+f"(sums[i][j][0]), "+f"(sums[i][j][1]), "+f"(sums[i][j][2]), "+f"(sums[i][j][3])
              : "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(b[j][0]), "r"(b[j][1]));
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int64_t row = m0 + 16 * i + g + c / 2 * 8, n = column + n0 + 8 * j + 2 * t + c % 2;
        if (row >= tile.rows || n >= p.N) continue;
        float* y = p.y + (tile.first + row) * p.y_stride + n;
        *y = p.add ? fmaf(p.alpha, sums[i][j][c], *y) : p.alpha * sums[i][j][c];
      }
}

}  // namespace

void multiply_few(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const Tensor& y, bool add) {
  const Few p{static_cast<const __half*>(w.data),
              static_cast<const __half*>(x.data),
              static_cast<float*>(y.data),
              w.rows,
              w.cols,
              x.strides[0],
              y.strides[0],
              w.alpha,
              add};
  const int rows = static_cast<int>(x.sizes[0]);
  const int64_t blocks = ceil_div(w.rows, kFewThreads / 32);
  launch(kOp, stream, rows > 0 ? blocks : 0, kFewThreads, 0, rows == 1 ? few_kernel<1> : few_kernel<kFewRows>, p, rows);
}

void multiply_tiles(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const Tensor& y, bool add,
                    const Routing* routing) {
  Tiles p{};
  p.w = static_cast<const __half*>(w.data);
  p.x = static_cast<const __half*>(x.data);
  p.y = static_cast<float*>(y.data);
  p.M = x.sizes[0];
  p.N = w.rows;
  p.K = w.cols;
  p.x_stride = x.strides[0];
  p.y_stride = y.strides[0];
  p.alpha = w.alpha;
  p.add = add;
  p.row_tiles = ceil_div(p.M, kTile);
  if (routing) {
    p.first_row = static_cast<const int32_t*>(routing->first_row.data);
    p.experts = routing->first_row.sizes[1] - 1;
    p.row_tiles = std::min(p.M, p.row_tiles + p.experts);  // every expert may have one partial tile
  }
  p.column_tiles = ceil_div(p.N, kTile);
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  p.vectorized = p.K % 8 == 0 && p.x_stride % 8 == 0 && aligned(p.w) && aligned(p.x);
  launch(kOp, stream, p.row_tiles * p.column_tiles, kTileThreads, 0, tiles_kernel, p);
}

}  // namespace weft::model::cuda
