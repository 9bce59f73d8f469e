// mma.m16n8k16 of 16-bit operands, ldmatrix and cp.async, for sm_80 and later.
//
// Fragments for lane = 4 g + t: an accumulator holds rows g and g + 8, columns 2 t and 2 t + 1. Two neighbouring accumulators, rounded,
// are the A operand of an mma over their columns. B is loaded from rows n of k contiguous elements, or transposed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace weft::cuda {

struct FragmentA {
  uint32_t x[4];
};

template <class Half>
__device__ inline uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <class Half>
__device__ inline float2 unpack(uint32_t pair);
template <>
__device__ inline float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ inline float2 unpack<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Bit 0: the first of the pair is finite. Bit 1: the second is.
template <class Half>
__device__ inline uint32_t finite_pair(uint32_t pair) {
  constexpr uint32_t kLow = std::is_same_v<Half, __half> ? 0x7c00u : 0x7f80u, kHigh = kLow << 16;
  return ((pair & kLow) != kLow ? 1u : 0u) | ((pair & kHigh) != kHigh ? 2u : 0u);
}

// Two neighbouring accumulators as an A operand.
template <class Half>
__device__ inline FragmentA operand(const float (&left)[4], const float (&right)[4]) {
  return {
      {pack<Half>(left[0], left[1]), pack<Half>(left[2], left[3]), pack<Half>(right[0], right[1]), pack<Half>(right[2], right[3])}};
}

// Splits x into a sum of two 16-bit numbers: an mma of each part gives nearly f32 precision.
template <class Half>
__device__ inline void split(const float (&left)[4], const float (&right)[4], FragmentA& high, FragmentA& low) {
  high = operand<Half>(left, right);
  float rest[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 l = unpack<Half>(high.x[i]), r = unpack<Half>(high.x[2 + i]);
    rest[0][2 * i] = left[2 * i] - l.x;
    rest[0][2 * i + 1] = left[2 * i + 1] - l.y;
    rest[1][2 * i] = right[2 * i] - r.x;
    rest[1][2 * i + 1] = right[2 * i + 1] - r.y;
  }
  low = operand<Half>(rest[0], rest[1]);
}

template <class Half>
__device__ inline void multiply(float (&c)[4], const FragmentA& a, uint32_t b0, uint32_t b1);
template <>
__device__ inline void multiply<__nv_bfloat16>(float (&c)[4], const FragmentA& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply<__half>(float (&c)[4], const FragmentA& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

// The part of x that tf32 holds; x less that part is exact.
__device__ inline uint32_t tf32_part(float x) { return __float_as_uint(x) & 0xffffe000u; }
// m16n8k8 of tf32. A: rows g and g + 8 of column t, then of column t + 4. B: rows t and t + 4 of column g.
__device__ inline void multiply_tf32(float (&c)[4], const FragmentA& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

// The same value, whose origin the compiler does not know: it is kept in a register, or what follows from it is computed only here.
__device__ inline uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Loads four 8 x 8 matrices; lane l passes the address of row l % 8 of matrix l / 8.
__device__ inline void ldmatrix(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}
__device__ inline void ldmatrix_trans(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

__device__ inline uint32_t load_shared_word(uint32_t address) {
  uint32_t x;
  asm("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}
__device__ inline uint4 load_shared(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}

// The row and the 16-byte piece whose address a lane passes to ldmatrix.
struct LdmatrixLane {
  int matrix, r;
  __device__ explicit LdmatrixLane(int lane) : matrix(lane / 8), r(lane % 8) {}
  // B operands for 16 columns: rows n of k contiguous elements.
  __device__ int row() const { return (matrix >> 1) * 8 + r; }
  __device__ int piece() const { return matrix & 1; }
  // B operands from rows k of n contiguous elements (ldmatrix_trans), and A operands from rows m of k contiguous elements.
  __device__ int across_row() const { return (matrix & 1) * 8 + r; }
  __device__ int across_piece() const { return matrix >> 1; }
};

// Transposes an 8 x 8 matrix held across a warp.
__device__ inline uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Copies 16 bytes from global to shared memory asynchronously; writes zeros when not `there`.
__device__ inline void cp_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Copies `bytes` of 16, 8 or 4 bytes, aligned to that, and writes zeros after them.
template <int Size>
__device__ inline void cp_async_part(uint32_t to, const void* from, int bytes) {
  if constexpr (Size == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Size), "r"(bytes) : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// A swizzled tile of 16-bit elements in shared memory: rows of `Columns` elements. The 16-byte pieces of a row are XORed with the row, so
// that one piece of eight rows, and eight pieces of one row, are free of bank conflicts.
template <int Columns>
struct Tile {
  static constexpr int kPieces = Columns / 8, kRowBytes = Columns * 2;
  static constexpr int kShift = kPieces >= 8 ? 0 : kPieces == 4 ? 1 : kPieces == 2 ? 2 : 3;  // rows that share 128 bytes
  static constexpr int kMask = kPieces >= 8 ? 7 : kPieces - 1;
  __device__ static constexpr uint32_t offset(int row, int piece) {
    return static_cast<uint32_t>(row * kRowBytes + ((piece ^ ((row >> kShift) & kMask)) << 4));
  }
};

}  // namespace weft::cuda
