// wgmma instructions of the dense prefill kernel, f16 with f32 sums.
#pragma once

#include "cuda/common/wgmma.cuh"

namespace weft::cuda::dense {

#if WEFT_HAS_WGMMA

#define WEFT_D4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WEFT_D8(d, i) WEFT_D4(d, i), WEFT_D4(d, i + 1)
#define WEFT_D32(d, i) WEFT_D8(d, i), WEFT_D8(d, i + 2), WEFT_D8(d, i + 4), WEFT_D8(d, i + 6)

// d = a b (+ d), both operands in shared memory in rows of contiguous elements k.
template <bool Accumulate>
__device__ __forceinline__ void multiply_shared(float (&d)[20][4], uint32_t a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %82, 0;\nmov.b64 a, {%80, " WEFT_DESCRIPTOR_REST
      "};\nmov.b64 b, {%81, " WEFT_DESCRIPTOR_REST
      "};\nwgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"
      "%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
      "}, a, b, p, 1, 1, 0, 0;\n}\n"
      : WEFT_D32(d, 0), WEFT_D32(d, 8), WEFT_D8(d, 16), WEFT_D8(d, 18)
      : "r"(a), "r"(b), "n"(static_cast<int>(Accumulate)));
}
template <bool Accumulate>
__device__ __forceinline__ void multiply_shared(float (&d)[10][4], uint32_t a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %42, 0;\nmov.b64 a, {%40, " WEFT_DESCRIPTOR_REST
      "};\nmov.b64 b, {%41, " WEFT_DESCRIPTOR_REST
      "};\nwgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39"
      "}, a, b, p, 1, 1, 0, 0;\n}\n"
      : WEFT_D32(d, 0), WEFT_D8(d, 8)
      : "r"(a), "r"(b), "n"(static_cast<int>(Accumulate)));
}

// The low half of the descriptor of a matrix of rows k whose n are contiguous: panels of 64 n are `panel` bytes apart.
__device__ __forceinline__ uint32_t transposed_descriptor(uint32_t address, uint32_t panel) {
  return (address & 0x3ffffu) >> 4 | panel >> 4 << 16;
}

// d += a b, a in registers, b such a matrix.
__device__ __forceinline__ void multiply_transposed(float (&d)[8][4], const FragmentA& a, uint32_t b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%36, " WEFT_DESCRIPTOR_REST
      "};\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
      "}, {%32,%33,%34,%35}, b, 1, 1, 1, 1;\n}\n"
      : WEFT_D32(d, 0)
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b));
}
__device__ __forceinline__ void multiply_transposed(float (&d)[16][4], const FragmentA& a, uint32_t b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%68, " WEFT_DESCRIPTOR_REST
      "};\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"
      "%63"
      "}, {%64,%65,%66,%67}, b, 1, 1, 1, 1;\n}\n"
      : WEFT_D32(d, 0), WEFT_D32(d, 8)
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b));
}
__device__ __forceinline__ void multiply_transposed(float (&d)[32][4], const FragmentA& a, uint32_t b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%132, " WEFT_DESCRIPTOR_REST
      "};\nwgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"
      "%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,"
      "%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%"
      "121,%122,%123,%124,%125,%126,%127"
      "}, {%128,%129,%130,%131}, b, 1, 1, 1, 1;\n}\n"
      : WEFT_D32(d, 0), WEFT_D32(d, 8), WEFT_D32(d, 16), WEFT_D32(d, 24)
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b));
}

#undef WEFT_D32
#undef WEFT_D8
#undef WEFT_D4

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda::dense
