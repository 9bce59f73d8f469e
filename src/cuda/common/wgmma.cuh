// Hopper's wgmma, TMA and mbarrier instructions. Only builds for sm_90a contain the code.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WEFT_HAS_WGMMA 1
#else
#define WEFT_HAS_WGMMA 0
#endif

namespace weft::cuda {

// The low half of a wgmma matrix descriptor: start address / 16 and leading byte offset / 16. The high half is the same for all matrices:
// 128-byte swizzle, as in Tile<64>, and a stride byte offset of 1024 bytes for eight rows. A matrix has rows n of 64 contiguous 16-bit
// elements k and begins at a multiple of 1024 bytes; an advance of 16 elements along k adds 32 bytes to the address.
__device__ inline uint32_t smem_descriptor(uint32_t address) { return (address & 0x3ffffu) >> 4 | 1u << 16; }
#define WEFT_DESCRIPTOR_REST "0x40000040"

#if WEFT_HAS_WGMMA

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Stops the compiler from moving accesses to accumulators across a wgmma wait or start.
template <int N>
__device__ inline void pin(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[i][e])::"memory");
}

#define WEFT_D4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WEFT_D16(d, i) WEFT_D4(d, i), WEFT_D4(d, i + 1), WEFT_D4(d, i + 2), WEFT_D4(d, i + 3)
#define WEFT_D32(d, i) WEFT_D16(d, i), WEFT_D16(d, i + 4)

#define WEFT_WGMMA_32(type)                                                                                       \
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, " WEFT_DESCRIPTOR_REST   \
               "};\nwgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                    \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, b, p, 1, 1, 0;\n}\n" \
               : WEFT_D16(d, 0)                                                                                   \
               : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b), "n"(static_cast<int>(Accumulate)))

#define WEFT_WGMMA_64(type)                                                                                                        \
  asm volatile(                                                                                                                    \
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, " WEFT_DESCRIPTOR_REST                             \
      "};\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                              \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, " \
      "{%32,%33,%34,%35}, b, p, 1, 1, %38;\n}\n"                                                                                   \
      : WEFT_D32(d, 0)                                                                                                             \
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b), "n"(static_cast<int>(Accumulate)),                             \
        "n"(static_cast<int>(Transposed)))

#define WEFT_WGMMA_SHARED(type)                                                                                                    \
  asm volatile(                                                                                                                    \
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, " WEFT_DESCRIPTOR_REST                          \
      "};\n"                                                                                                                       \
      "mov.b64 b, {%33, " WEFT_DESCRIPTOR_REST "};\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                     \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, " \
      "a, b, p, 1, 1, 0, 0;\n}\n"                                                                                                  \
      : WEFT_D32(d, 0)                                                                                                             \
      : "r"(a), "r"(b), "n"(static_cast<int>(Accumulate)))

#define WEFT_WGMMA_SHARED_32(type)                                                                                      \
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %18, 0;\nmov.b64 a, {%16, " WEFT_DESCRIPTOR_REST      \
               "};\n"                                                                                                   \
               "mov.b64 b, {%17, " WEFT_DESCRIPTOR_REST "};\nwgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, a, b, p, 1, 1, %19, 0;\n}\n"                  \
               : WEFT_D16(d, 0)                                                                                         \
               : "r"(a), "r"(b), "n"(static_cast<int>(Accumulate)), "n"(static_cast<int>(Transposed)))

#define WEFT_WGMMA_128(type)                                                                                                     \
  asm volatile(                                                                                                                  \
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %69, 0;\nmov.b64 b, {%68, " WEFT_DESCRIPTOR_REST                           \
      "};\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                           \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61," \
      "%62,%63}, {%64,%65,%66,%67}, b, p, 1, 1, 0;\n}\n"                                                                         \
      : WEFT_D32(d, 0), WEFT_D32(d, 8)                                                                                           \
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b), "n"(static_cast<int>(Accumulate)))

// d = a b (+ d) for 64 rows, of which a warp holds 16 in mma fragments, as many columns as d has, and 16 elements k. A is in registers.
// `Transposed`: b is stored in rows k of 64 contiguous columns.
template <class Half, bool Accumulate, bool Transposed = false>
__device__ inline void wgmma(float (&d)[8][4], const FragmentA& a, uint32_t b) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>)
    WEFT_WGMMA_64("bf16");
  else
    WEFT_WGMMA_64("f16");
}
template <class Half, bool Accumulate>
__device__ inline void wgmma(float (&d)[4][4], const FragmentA& a, uint32_t b) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>)
    WEFT_WGMMA_32("bf16");
  else
    WEFT_WGMMA_32("f16");
}
template <class Half, bool Accumulate>
__device__ inline void wgmma(float (&d)[16][4], const FragmentA& a, uint32_t b) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>)
    WEFT_WGMMA_128("bf16");
  else
    WEFT_WGMMA_128("f16");
}

// The same with A in shared memory too.
template <class Half, bool Accumulate>
__device__ inline void wgmma_shared(float (&d)[8][4], uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>)
    WEFT_WGMMA_SHARED("bf16");
  else
    WEFT_WGMMA_SHARED("f16");
}

// `Transposed`: a is stored in rows k of 64 contiguous columns.
template <class Half, bool Accumulate, bool Transposed = false>
__device__ inline void wgmma_shared(float (&d)[4][4], uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>)
    WEFT_WGMMA_SHARED_32("bf16");
  else
    WEFT_WGMMA_SHARED_32("f16");
}

#undef WEFT_WGMMA_128
#undef WEFT_WGMMA_SHARED_32
#undef WEFT_WGMMA_SHARED
#undef WEFT_WGMMA_64
#undef WEFT_WGMMA_32
#undef WEFT_D32
#undef WEFT_D16
#undef WEFT_D4

// Sets the registers per thread of the calling warpgroup.
template <int Count>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// Stores four 8 x 8 matrices to shared memory, transposed; lane l passes the address of row l % 8 of matrix l / 8.
__device__ inline void stmatrix_trans(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ inline void stmatrix(uint32_t address, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}

// Bulk TMA store from shared to global memory, as a bulk group of its own.
__device__ inline void tma_store_bulk(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
// TMA store of a box to a 3-d tensor, as a bulk group of its own; elements outside the tensor are not written.
__device__ inline void tma_store(const CUtensorMap& map, int x, int y, int z, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];\ncp.async.bulk.commit_group;" ::"l"(
          &map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Waits until the stores of this thread have read shared memory, which may then be overwritten or released.
__device__ inline void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Named barrier of the 128 threads of one warpgroup.
__device__ inline void warpgroup_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// mbarrier: counts arrivals and, with expect_tx, transferred bytes.
__device__ inline void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the mbarrier of block `rank` of the cluster that has the address of `barrier` in its own shared memory. It signals that this
// thread has finished reading. The data is in registers by then, so that no fence is needed; a cluster fence would wait for global memory.
__device__ inline void mbarrier_arrive_cluster(uint32_t barrier, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
__device__ inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra.uni finished;\nbra.uni wait;\n"
      "finished:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Has the phase completed? Does not wait.
__device__ inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
               : "=r"(passed)
               : "r"(barrier), "r"(parity)
               : "memory");
  return passed;
}

// The full and empty mbarriers of the stages of a pipeline.
struct StageBarriers {
  uint32_t full, empty;  // addresses for stage 0; the other stages follow
  __device__ uint32_t full_of(int stage) const { return full + stage * 8; }
  __device__ uint32_t empty_of(int stage) const { return empty + stage * 8; }
};

// Bulk TMA load from global to shared memory; its bytes complete on the mbarrier.
__device__ inline void tma_load_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// TMA load of a box of a 3-d tensor from element (x, y, z); elements outside the tensor are zero.
__device__ inline void tma_load(uint32_t to, const CUtensorMap& map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same for a 4-d tensor and element (x, y, z, w).
__device__ inline void tma_load(uint32_t to, const CUtensorMap& map, int x, int y, int z, int w, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// The bulk load and the 3-d load, multicast to both blocks of a cluster of two: to the same shared memory address of each, completing on the mbarrier
// of each.
__device__ inline void tma_load_bulk_multicast(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(uint16_t{0b11})
      : "memory");
}
__device__ inline void tma_load_multicast(uint32_t to, const CUtensorMap& map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(uint16_t{0b11})
      : "memory");
}

// Prefetches the box into the L2 for a later TMA load.
__device__ inline void tma_prefetch(const CUtensorMap& map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// Makes this thread's writes to shared memory visible to the async proxy: wgmma and TMA.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda
