// Row operations between GEMMs on the cpu, all f32: norms, rotary positions, gates, sums.
//
// The result of a row does not depend on the other rows.
#pragma once

#include <cstdint>

#include "weft/device.h"
#include "weft/tensor.h"

namespace weft::model {

// Rows of f32 numbers, `stride` numbers apart.
struct StridedRows {
  float* data = nullptr;
  int64_t stride = 0;
};

// y = x / sqrt(mean(x^2) + eps) * weight, for `count` rows of `size` numbers. y may be x.
void rms_norm(const Stream& stream, int64_t count, int64_t size, StridedRows x, const float* weight, float eps, StridedRows y);

// RMS norm and rotary positions of heads, in place: head h of token t is the `size` numbers at x.data + t * x.stride + h *
// head_stride. After the norm, channels j and j + half, j < half, are rotated by (cosine, sine)[t * half + j].
struct HeadRotation {
  StridedRows x;
  int64_t tokens = 0, heads = 0, head_stride = 0, size = 0;
  const float* weight = nullptr;  // [size]
  float eps = 0;
  const float *cosine = nullptr, *sine = nullptr;  // [tokens, half]
  int64_t half = 0;
};
void norm_and_rotate(const Stream& stream, const HeadRotation& args);

// Heads of the rows, `head` numbers apart.
struct HeadRows {
  StridedRows rows;
  int64_t head = 0;
};

// y[h] = x[h] * sigmoid(gate[h]) for heads of `size` numbers. y may be x.
void sigmoid_gate(const Stream& stream, int64_t tokens, int64_t heads, int64_t size, HeadRows x, HeadRows gate, HeadRows y);

// y[0 .. size) = silu(x[0 .. size)) * x[size .. 2 size). y may be x.
void swiglu(const Stream& stream, int64_t count, int64_t size, StridedRows x, StridedRows y);

// y += sigmoid(gate[0]) * x, row by row.
void add_gated(const Stream& stream, int64_t count, int64_t size, StridedRows x, StridedRows gate, StridedRows y);

// y += weight * x for one row.
void add_scaled(const Stream& stream, int64_t size, const float* x, float weight, float* y);

// x += bias for every row.
void add_bias(const Stream& stream, int64_t count, int64_t size, StridedRows x, const float* bias);

// log(sum_i e^(x_i)) of one row, accumulated in double; for losses.
double log_sum_exp(const Stream& stream, const float* x, int64_t size);

}  // namespace weft::model
