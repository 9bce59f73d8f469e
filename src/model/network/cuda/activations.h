// Row operations between GEMMs on a GPU. Compute in model/network/compute.h says what each one computes.
#pragma once

#include <vector>

#include "model/network/compute.h"
#include "model/network/cuda/gemm.h"

namespace weft::model::cuda {

// swiglu() scales its results by this factor, because they can exceed the range of f16 operands. The following GEMM scales back:
// its DeviceMatrix::alpha includes the inverse.
inline constexpr float kHiddenScale = 1.0f / 64;

void embed(const Stream& stream, const DeviceMatrix& table, const int32_t* tokens, const Tensor& x);
void rotations(const Stream& stream, const float* frequencies, float factor, const Tensor& positions, const Tensor& cosine,
               const Tensor& sine);
void rms_norm(const Stream& stream, const Tensor& x, const float* weight, float eps, const Tensor& y);
void norm_and_rotate(const Stream& stream, const Tensor& q, const float* q_weight, const Tensor& k, const float* k_weight,
                     float eps, const Tensor& cosine, const Tensor& sine);
void sigmoid_gate(const Stream& stream, const Tensor& x, const Tensor& gate, const Tensor& y);
void swiglu(const Stream& stream, const Tensor& x, const Tensor& y);
void add_gated(const Stream& stream, const Tensor& x, const Tensor& gate, const Tensor& y);
void add_bias(const Stream& stream, const Tensor& x, const float* bias);
// to = from * scale as f16, in place or not. With `residual`: what that f16 number leaves of from * scale, as f16, not in place.
void convert(const Stream& stream, const void* from, DType dtype, int64_t count, float scale, bool residual, void* to);

// Splits f32 numbers into two f16 numbers: rows [0, T) of split_x are x rounded to f16, rows [T, 2 T) the residuals.
void split(const Stream& stream, const Tensor& x, const Tensor& split_x);

// best[t] = argmax of logits[t], the first of equal ones. NaN is never chosen.
void best_of(const Stream& stream, const Tensor& logits, const Tensor& best);

// Mixture of experts: see Routing.
void route(const Stream& stream, int64_t k, bool normalize, const Tensor& logits, const Routing& routing);
void gather(const Stream& stream, const Tensor& x, const Routing& routing, const Tensor& to);
void scatter(const Stream& stream, const Tensor& from, const Routing& routing, const Tensor& x);

}  // namespace weft::model::cuda
