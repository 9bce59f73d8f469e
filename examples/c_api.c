/* The gates of a gated delta network through the C interface, and an error. */
#include <math.h>
#include <stdio.h>
#include <weft/c.h>

int main(void) {
  enum { T = 2, HV = 2 };
  float a[T * HV] = {0, 1, 2, 3}, b[T * HV] = {0, 0, 0, 0}, a_log[HV] = {0, 0}, dt_bias[HV] = {0, 0};
  float g[T * HV], beta[T * HV];
  const int64_t rows[2] = {T, HV}, heads[1] = {HV};

  weft_delta_gates_args args = {.struct_size = sizeof args};
  args.a = weft_dense(a, WEFT_F32, 2, rows);
  args.b = weft_dense(b, WEFT_F32, 2, rows);
  args.a_log = weft_dense(a_log, WEFT_F32, 1, heads);
  args.dt_bias = weft_dense(dt_bias, WEFT_F32, 1, heads);
  args.g = weft_dense(g, WEFT_F32, 2, rows);
  args.beta = weft_dense(beta, WEFT_F32, 2, rows);

  weft_status status = {.struct_size = sizeof status};
  if (weft_delta_gates(NULL, &args, NULL, 0, &status) != WEFT_OK) {
    fprintf(stderr, "%s\n", status.message);
    return 1;
  }
  printf("weft %s: g = %.6f, wanted -log 2; beta = %.3f, wanted 0.5\n", weft_version(), g[0], beta[0]);
  if (fabsf(g[0] + logf(2)) > 1e-6f || beta[0] != 0.5f) return 1;

  args.beta.rank = 0; /* b without beta is refused with a sentence */
  if (weft_delta_gates(NULL, &args, NULL, 0, &status) != WEFT_INVALID_ARGUMENT) return 1;
  printf("%s\n", status.message);
  return 0;
}
