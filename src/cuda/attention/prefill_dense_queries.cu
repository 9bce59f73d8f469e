// Kernels before the dense prefill kernel: queries as f16 in scratch.
#include "cuda/attention/prefill_dense_prepare.h"
#include "cuda/attention/prefill_query.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {
namespace {

constexpr int kWarps = 8;

struct QueriesParams {
  QueryParams queries;
  uint8_t* to = nullptr;
  float2* scales = nullptr;
  int D = 0;          // of rows in scratch
  bool wide = false;  // a lane's coordinates may be loaded at once
};

// A lane's E coordinates of a row, as they are in memory; 16-bit numbers in pairs.
template <int E>
__device__ __forceinline__ void load_coordinates(const StridedView& q, int64_t at, bool wide, uint32_t (&bits)[E]) {
  if (wide && q.dtype == DType::f32) {
    const auto* from = reinterpret_cast<const uint2*>(static_cast<const uint32_t*>(q.data) + at);
#pragma unroll
    for (int i = 0; i < E / 2; ++i) {
      const uint2 two = from[i];
      bits[2 * i] = two.x, bits[2 * i + 1] = two.y;
    }
  } else if (wide) {
    const auto* from = reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(q.data) + at);
#pragma unroll
    for (int i = 0; i < E / 2; ++i) {
      const uint32_t two = from[i];
      bits[2 * i] = two & 0xffffu, bits[2 * i + 1] = two >> 16;
    }
  } else {
#pragma unroll
    for (int e = 0; e < E; ++e) bits[e] = load_bits(q, at + e);
  }
}

// A warp prepares kEach rows of 32 E coordinates.
constexpr int kEach = 4;
template <int E>
__global__ void __launch_bounds__(32 * kWarps) prefill_queries_kernel(const __grid_constant__ QueriesParams p) {
  pdl_wait();
  pdl_launch_dependents();
  const QueryParams& q = p.queries;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t rows = q.T * q.group, first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * kEach, heads = q.Hk * q.group;
  uint32_t bits[kEach][E];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t row = min(first + i, rows * q.Hk - 1);
    const auto t = static_cast<uint32_t>(row / heads), hq = static_cast<uint32_t>(row % heads);
    load_coordinates<E>(q.queries.q, t * q.queries.q.strides[0] + hq * q.queries.q.strides[1] + lane * E, p.wide, bits[i]);
  }
#pragma unroll 1
  for (int i = 0; i < kEach; ++i) {
    const int64_t row = first + i;
    if (row >= rows * q.Hk) return;
    const int64_t t = row / heads, hq = row % heads, hk = hq / q.group, to = hk * rows + t * q.group + hq % q.group;
    uint32_t now[E];
#pragma unroll
    for (int e = 0; e < E; ++e) now[e] = i == 0 ? bits[0][e] : i == 1 ? bits[1][e] : i == 2 ? bits[2][e] : bits[3][e];
    float x[E], unit = 1;
    const float rotated = rotate_query<E>(q, now, hk, lane, x);
    const float from_mean = prefill::fit_query<E>(q.scale, rotated, x, unit);
    auto* const words = reinterpret_cast<uint32_t*>(p.to) + (to * p.D + lane * E) / 2;
#pragma unroll
    for (int e = 0; e < E; e += 2) words[e / 2] = pack<__half>(x[e], x[e + 1]);
    if (lane == 0) p.scales[to] = {unit, from_mean * score_unit(q.scale, q.mask.has_softcap())};
  }
}

// The same for heads of any size and rotation: a warp prepares one row.
__global__ void __launch_bounds__(32 * kWarps) prefill_queries_any_kernel(const __grid_constant__ QueriesParams p) {
  extern __shared__ float memory[];
  pdl_wait();
  pdl_launch_dependents();
  const QueryParams& q = p.queries;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32), D = q.k_rotate.D;
  const int64_t rows = q.T * q.group, heads = q.Hk * q.group, row = int64_t{blockIdx.x} * kWarps + warp;
  if (row >= rows * q.Hk) return;
  const int64_t t = row / heads, hq = row % heads, hk = hq / q.group, to = hk * rows + t * q.group + hq % q.group;
  constexpr int kMost = 8;  // coordinates of a lane
  float* const x = memory + warp * 3 * 32 * kMost;
  float own[kMost], unit = 1;
  const float rotated = load_query(q, {t, hq}, hk, x, x + 32 * kMost, lane);
  __syncwarp();
#pragma unroll
  for (int e = 0; e < kMost; ++e) own[e] = lane * kMost + e < D ? x[lane * kMost + e] : 0.0f;
  const float from_mean = prefill::fit_query<kMost>(q.scale, rotated, own, unit);
#pragma unroll
  for (int e = 0; e < kMost; e += 2)
    if (lane * kMost + e < p.D)
      reinterpret_cast<uint32_t*>(p.to)[(to * p.D + lane * kMost + e) / 2] = pack<__half>(own[e], own[e + 1]);
  if (lane == 0) p.scales[to] = {unit, from_mean * score_unit(q.scale, q.mask.has_softcap())};
}

}  // namespace

void launch_prepare_queries(const char* op, const Stream& stream, const QueryParams& queries, const DensePrepared& prepared,
                            int D) {
  QueriesParams p{queries, prepared.queries, prepared.row_scales, D};
  const StridedView& q = queries.queries.q;
  const int own = queries.k_rotate.D, E = own / 32;
  const int64_t rows = queries.T * queries.group * queries.Hk, element = dtype_bytes(q.dtype);
  p.wide = reinterpret_cast<uintptr_t>(q.data) % static_cast<uintptr_t>(2 * element) == 0 && (q.strides[0] | q.strides[1]) % 2 == 0;
  const bool simple =
      queries.k_rotate.rotation == Rotation::none || (queries.k_rotate.rotation == Rotation::srht && queries.k_rotate.base == 1);
  const int64_t blocks = ceil_div(rows, kWarps * kEach);
  if (!simple || own != D)
    return launch_pdl(op, stream, ceil_div(rows, kWarps), 32 * kWarps, size_t{kWarps} * 3 * 256 * sizeof(float),
                      prefill_queries_any_kernel, p);
  launch_pdl(op, stream, blocks, 32 * kWarps, 0,
             E == 2   ? prefill_queries_kernel<2>
             : E == 4 ? prefill_queries_kernel<4>
                      : prefill_queries_kernel<8>,
             p);
}

}  // namespace weft::cuda
