// What happens to rows of activations between matrix products, on a GPU: see Compute in model/network/compute.h for what each computes.
#pragma once

#include <vector>

#include "model/network/compute.h"
#include "model/network/cuda/gemm.h"

namespace weft::model::cuda {

// What swiglu() writes is this much smaller than it should be: the products of a gated feed-forward can be far beyond the others, and
// operands are f16. The product that follows multiplies it back.
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
// Numbers times the scale to f16, in place or not; or what that leaves of them, not in place.
void convert(const Stream& stream, const void* from, DType dtype, int64_t count, float scale, bool rest, void* to);

// The f16 number nearest to each of x, then that nearest to what is left: rows [0, T) and [T, 2 T) of `halves`.
void split(const Stream& stream, const Tensor& x, const Tensor& halves);

// best[t] = the column of the largest of logits[t], the first of equal ones; NaN is never it.
void best_of(const Stream& stream, const Tensor& logits, const Tensor& best);

// Experts of tokens: see Routing.
void route(const Stream& stream, int64_t k, bool normalize, const Tensor& logits, const Routing& routing);
void gather(const Stream& stream, const Tensor& x, const Routing& routing, const Tensor& to);
void scatter(const Stream& stream, const Tensor& from, const Routing& routing, const Tensor& x);

}  // namespace weft::model::cuda
