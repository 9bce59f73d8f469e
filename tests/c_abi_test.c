/* The part of the C ABI test that a C compiler sees: the header as C11, and a decode step written in C. */
#include "weft/c.h"

#include <string.h>

/* The layout that WEFT_C_ABI 2 promises on 64-bit machines. */
#if UINTPTR_MAX > 0xffffffffu
#define WEFT_SIZE(name, size) _Static_assert(sizeof(name) == size, #name);
#define WEFT_MEMBER(name, member, offset, size) \
  _Static_assert(offsetof(name, member) == offset && sizeof(((name*)0)->member) == size, #name "." #member);
#else
#define WEFT_SIZE(name, size)
#define WEFT_MEMBER(name, member, offset, size)
#endif
#define WEFT_CONSTANT(name, value) _Static_assert(name == value, #name);
_Static_assert(WEFT_C_ABI == 2, "a new ABI has a new list");
#include "c_layout.inc"

int c_decode_step(float* q, float* k, float* v, float* g, float* beta, float* state, float* o, int64_t n, int64_t hk, int64_t hv,
                  int64_t dk, int64_t dv, weft_status* status);

/* One token for each of n sequences on the reference backend; o, and the states in place. */
int c_decode_step(float* q, float* k, float* v, float* g, float* beta, float* state, float* o, int64_t n, int64_t hk, int64_t hv,
                  int64_t dk, int64_t dv, weft_status* status) {
  const int64_t key[3] = {n, hk, dk}, value[3] = {n, hv, dv}, gate[2] = {n, hv}, matrix[4] = {n, hv, dv, dk};
  weft_stream stream = {.struct_size = sizeof stream, .backend = WEFT_BACKEND_REFERENCE};
  weft_gated_delta_rule_decode_args args = {.struct_size = sizeof args};
  size_t bytes = 1;
  int code;
  args.q = weft_dense(q, WEFT_F32, 3, key);
  args.k = weft_dense(k, WEFT_F32, 3, key);
  args.v = weft_dense(v, WEFT_F32, 3, value);
  args.gates.g = weft_dense(g, WEFT_F32, 2, gate);
  args.gates.beta = weft_dense(beta, WEFT_F32, 2, gate);
  args.o = weft_dense(o, WEFT_F32, 3, value);
  args.l2_norm = 1;
  args.sequences.count = n;
  args.states.in = weft_dense(state, WEFT_F32, 4, matrix);
  args.states.out = args.states.in;
  code = weft_gated_delta_rule_decode_scratch_bytes(&stream, &args, &bytes, status);
  if (code != WEFT_OK || bytes != 0) return code != WEFT_OK ? code : -1;
  return weft_gated_delta_rule_decode(&stream, &args, NULL, 0, status);
}
