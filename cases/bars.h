// Error bars: how far a result may be from the reference on the same inputs, as relative RMS, each with its derivation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "weft/tensor.h"

namespace weft::cases {

// Bounds by the arithmetic of the kernel: f32 (reference, cpu), 16-bit tensor cores (cuda), integer dot products (cpu kernels with
// ".integer" in their name; 0 where the op has none).
struct Bar {
  double f32;
  double tensor_core;
  double integer = 0;
};

// f32 arithmetic over T dependent tokens. One f32 operation errs by at most u = 2^-24 = 6e-8. A token of the delta rule takes a
// dozen dependent operations over K-term sums. Independent errors of T tokens add in quadrature: 2e-6 sqrt(T) is about 33 u per
// token.
inline double arithmetic(int64_t tokens = 1) { return 2e-6 * std::sqrt(static_cast<double>(std::max<int64_t>(tokens, 1))); }

// Rounding a result to `dtype`. Half a unit in the last place is at most 2^-8 (bf16) or 2^-11 (f16) of a value. Its RMS over all
// mantissas is ulp / sqrt(12) / 1.44: 1.6e-3 (bf16) and 2.0e-4 (f16). The bar adds a quarter: 2e-3 and 2.5e-4. A tensor of few
// elements need not be average, so it gets the worst case.
inline double rounding(DType dtype, int64_t elements) {
  const bool few = elements < 1024;
  switch (dtype) {
    case DType::bf16: return few ? 0x1p-8 : 2e-3;
    case DType::f16: return few ? 0x1p-11 : 2.5e-4;
    default: return 0;  // f32: inside arithmetic()
  }
}

// Results of a bounded number of f32 operations (gates, norms, convolutions, rotations), stored in `out`.
inline Bar small_op(DType out, int64_t elements) {
  const double bar = arithmetic() + rounding(out, elements);
  return {bar, bar};
}

// Tensor-core kernels of the delta rule stage operands in 16 bits. With Gaussian keys in bf16, the measured error of that staging
// is 3.5e-3 (o) and 3.2e-3 (S). Correlated keys and beta up to 2 amplify it. f16 keeps three more bits.
enum class Staged { output, state };

// f32 operands of chunked kernels are split into two bf16 numbers, which represent them with a relative RMS error of 1.6e-3^2 = 2.6e-6.
// Sums of products of two such operands err by sqrt(2) times that, and the two products behind an output add in quadrature: 5.2e-6. The bar
// is twice that, and twice as much again for a tensor of few elements, which need not be average. With correlated keys, beta up to 2 and no
// decay, the rule reflects errors instead of forgetting them: every token adds twice its rounding, 5.2e-6 sqrt(T). The bar adds a sixth.
inline Bar split_delta_bar(DType out, int64_t tokens, bool correlated, int64_t elements) {
  const double store = rounding(out, elements), f32 = arithmetic(tokens) + store;
  const double split = std::max(elements < 1024 ? 2e-5 : 1e-5, correlated ? 6e-6 * std::sqrt(static_cast<double>(tokens)) : 0);
  return {f32, std::max(f32, split + store)};
}

// chunked: prefill and summarize, whose kernels may split f32 inputs. The other ops compute f32 inputs in f32.
inline Bar delta_bar(Staged what, DType in, DType out, int64_t tokens, bool correlated, int64_t elements, bool chunked = false) {
  const double store = rounding(out, elements), f32 = arithmetic(tokens) + store;
  if (in == DType::f32) return chunked ? split_delta_bar(out, tokens, correlated, elements) : Bar{f32, f32};
  double staged = what == Staged::output ? (correlated ? 1.2e-2 : 4.2e-3) : (correlated ? 6e-3 : 3.8e-3);
  if (in == DType::f16) staged /= 4;
  return {f32, std::max(f32, staged + store)};
}

// On every accelerated backend chunk_wu rounds both operands of its product to the input dtype, then rounds u and w: sqrt(2)
// roundings. With correlated keys w nearly cancels, so that rounding dominates it, as it dominates the output of the whole rule.
inline Bar staged_wu_bar(DType in, DType out, int64_t chunk, bool correlated, int64_t elements) {
  const double f32 = arithmetic(chunk) + rounding(out, elements);
  if (in == DType::f32) return {f32, f32};
  const double staged = correlated ? (in == DType::bf16 ? 1.2e-2 : 3e-3) : 2 * rounding(in, elements);
  return {std::max(f32, staged), std::max(f32, staged)};
}

// Attention over a compressed cache. Where everything is f32 the bar is 1e-5. Where K has a codebook on the int8 grid, a backend
// may use integer dot products:
//   exact_scores: q and the weights carry 15 bits each; the error is 1e-3 with scores of a few units.
//   fast: q and the weights carry 8 bits each. Over long contexts q adds an error of 0.6 % and the weights 1.1 % (0.9 % and 0.8 %
//   where products are summed in 16 bits). Where few tokens carry the weight, the error is twice that or more: with random caches
//   of 8-bit keys, one in a hundred exceeds 3 %, and one in twenty where products are summed in 16 bits.
inline Bar attention_bar(bool integer_scores, bool fast, DType out, int64_t elements) {
  const double rounded = rounding(out, elements), integer = (fast ? 3e-2 : 1e-3) + rounded;
  return {1e-5 + rounded, integer_scores ? integer : 1e-5 + rounded, integer};
}

}  // namespace weft::cases
