// What the cpu kernels of delta_gates, short_conv, l2_norm and gated_rms_norm read.
#pragma once

#include "cpu/delta/delta_params.h"

namespace weft::cpu {

struct GatesParams {
  RowsView a, b, g, beta;  // b.data null: no strengths wanted
  const float* a_log = nullptr;
  const float* dt_bias = nullptr;
  int64_t a_log_stride = 0, dt_bias_stride = 0;
  int64_t Hv = 0, K = 1;
  bool per_channel = false;
  float beta_factor = 1;
};

struct ConvParams {
  RowsView x, y;  // x.head: the stride over channels
  const void* weight = nullptr;
  DType weight_dtype = DType::f32;
  int64_t weight_stride = 0;
  const void* bias = nullptr;
  DType bias_dtype = DType::f32;
  int64_t W = 0, L = 0;
  bool silu = true;
  const void* state_in = nullptr;
  DType in_dtype = DType::f32;
  int64_t in_slot_stride = 0, in_row_stride = 0, in_channel_stride = 1;
  void* state_out = nullptr;
  DType out_dtype = DType::f32;
  int64_t out_slot_stride = 0, out_row_stride = 0;
};

// Rows of a norm at equal strides. Bases and strides are in elements.
struct NormParams {
  const void *x = nullptr, *z = nullptr, *w = nullptr;
  void* y = nullptr;
  DType x_dtype = DType::f32, z_dtype = DType::f32, w_dtype = DType::f32, y_dtype = DType::f32;
  int64_t x_base = 0, z_base = 0, y_base = 0;
  int64_t x_stride = 0, z_stride = 0, y_stride = 0;
  int64_t D = 0;
  float eps = 0;
  bool silu = true;
};

}  // namespace weft::cpu
