// The rounding contract of chunk_wu on any backend: beta v and beta e^G k are rounded to bf16, products are summed in f32, and the
// sums are rounded to bf16.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "cases/problem.h"
#include "tests/support/delta.h"

namespace weft::tests {

// To the nearest bf16, ties to even.
inline float bf16_of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// Does x lie so near the middle of two bf16 numbers that a few f32 roundings decide between them?
inline bool near_a_tie(float x) {
  const auto below = static_cast<int>(std::bit_cast<uint32_t>(x) & 0xffffu);
  return std::abs(below - 0x8000) < 64;
}

// The distance between bf16 numbers of the size of x.
inline double bf16_unit(double x) { return std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7); }

// Inputs of chunk_wu in bf16, and the results that the contract demands. The reference computes the inverse.
class WuContract {
 public:
  WuContract(const DeltaOptions& options, int64_t chunk) : p_(options), chunk_(chunk) {
    const int64_t T = p_.tokens;
    args.k = p_.k;
    args.v = p_.v;
    args.beta = p_.beta;
    args.g_cumsum =
        options.per_channel ? p_.memory.make(DType::f32, {T, options.Hv, options.K}) : p_.memory.make(DType::f32, {T, options.Hv});
    args.a_inv = p_.memory.make(DType::f32, {T, options.Hv, chunk_});
    args.w = p_.memory.make(DType::bf16, {T, options.Hv, options.K});
    args.u = p_.memory.make(DType::bf16, {T, options.Hv, options.V});
    args.sequences = p_.sequences;
    args.chunk = chunk_;
    chunk_cumsum(cases::kReference, {p_.g, args.g_cumsum, p_.sequences, chunk_});
    // Move keys whose staged value lies near a tie: there an equally accurate e^G may round to another bf16.
    for (int64_t t = 0; t < T; ++t)
      for (int64_t c = 0; c < options.K; ++c)
        for (int64_t h = 0; h < options.Hv; ++h)
          if (near_a_tie(decayed_key(t, h, c))) {
            const int64_t at = t * p_.k.strides[0] + key_head_of(options, h) * p_.k.strides[1] + c;
            cases::set(p_.k, at, cases::get(p_.k, at) * (1 + 0x1p-7));
            h = -1;  // all heads again
          }
    chunk_kkt(cases::kReference, {p_.k, p_.beta, args.g_cumsum, args.a_inv, p_.sequences, chunk_});
    chunk_tri_inverse(cases::kReference, {args.a_inv, args.a_inv, p_.sequences, chunk_});
  }

  // Calls visit(got, staged, unrounded, reach) for every element of w and u. staged: the f32 sum of products of rounded operands.
  // unrounded: the sum with unrounded operands. reach: how far f32 sums of the staged products in any two orders can lie apart.
  template <class Visit>
  void each(Visit&& visit) const {
    const DeltaOptions& o = p_.options;
    for (size_t n = 0; n + 1 < p_.begins.size(); ++n)
      for (int64_t t = p_.begins[n]; t < p_.begins[n + 1]; ++t)
        for (int64_t h = 0; h < o.Hv; ++h) {
          for (int64_t c = 0; c < o.K; ++c)
            row(
                n, t, h, cases::get(args.w, (t * o.Hv + h) * o.K + c), [&](int64_t s) { return decayed_key(s, h, c); }, visit);
          for (int64_t c = 0; c < o.V; ++c)
            row(
                n, t, h, cases::get(args.u, (t * o.Hv + h) * o.V + c), [&](int64_t s) { return scaled_value(s, h, c); }, visit);
        }
  }

  // Runs the op in the memory of the stream's backend and copies the results to args.w and args.u.
  void run(const Stream& stream) {
    cases::Placement& placement = cases::placement_of(stream);
    cases::Image image(p_.memory, placement);
    const ChunkWuArgs there = cases::mapped(args, [&](const Tensor& tensor) { return image.at(tensor); });
    const size_t bytes = scratch_bytes(stream, there);
    uint8_t* lent = placement.allocate(bytes);
    chunk_wu(stream, there, {lent, bytes});
    image.fetch();
    placement.release(lent);
    for (const Tensor& to : {args.w, args.u}) std::memcpy(to.data, image.fetched(to).data, static_cast<size_t>(to.elements() * 2));
  }

  ChunkWuArgs args;

 private:
  float decayed_key(int64_t t, int64_t h, int64_t c) const {
    const DeltaOptions& o = p_.options;
    const double G =
        cases::get(args.g_cumsum, t * args.g_cumsum.strides[0] + h * args.g_cumsum.strides[1] + (o.per_channel ? c : 0));
    const double k = cases::get(p_.k, t * p_.k.strides[0] + key_head_of(o, h) * p_.k.strides[1] + c);
    return static_cast<float>(cases::get(p_.beta, t * o.Hv + h) * std::exp(G) * k);
  }
  float scaled_value(int64_t t, int64_t h, int64_t c) const {
    const DeltaOptions& o = p_.options;
    return static_cast<float>(cases::get(p_.beta, t * o.Hv + h)) * static_cast<float>(cases::get(p_.v, (t * o.Hv + h) * o.V + c));
  }
  template <class Operand, class Visit>
  void row(size_t n, int64_t t, int64_t h, double got, Operand&& operand, Visit&& visit) const {
    const int64_t i = (t - p_.begins[n]) % chunk_;
    float staged = 0;
    double unrounded = 0, size = 0;
    for (int64_t j = 0; j <= i; ++j) {
      const auto x = static_cast<float>(cases::get(args.a_inv, (t * p_.options.Hv + h) * chunk_ + j));
      const float y = operand(t - i + j), term = x * bf16_of(y);
      staged += term;
      unrounded += static_cast<double>(x) * y;
      size += std::fabs(term);
    }
    visit(got, staged, unrounded, static_cast<double>(i + 1) * 0x1p-23 * size);
  }

  DeltaProblem p_;
  int64_t chunk_;
};

// Shapes with their chunk lengths: decay per head and per channel, Gaussian and correlated keys.
inline std::vector<std::pair<DeltaOptions, int64_t>> contract_shapes() {
  std::vector<std::pair<DeltaOptions, int64_t>> shapes;
  for (bool per_channel : {false, true})
    for (Keys keys : {Keys::gaussian, Keys::positive})
      for (int64_t chunk : {16, 64})
        shapes.push_back({{.lengths = {130, 7},
                           .Hk = 1,
                           .Hv = 2,
                           .K = 24,
                           .V = 20,
                           .dtype = DType::bf16,
                           .per_channel = per_channel,
                           .g_low = -0.2,
                           .beta_high = 2,
                           .keys = keys},
                          chunk});
  return shapes;
}

inline void expect_wu_contract(const DeltaOptions& options, int64_t chunk, const Stream& stream) {
  SCOPED_TRACE("chunk " + std::to_string(chunk) + (options.per_channel ? " per channel" : ""));
  WuContract wu(options, chunk);
  wu.run(stream);
  int elements = 0, equal = 0, told_apart = 0, wrong = 0;
  wu.each([&](double got, float staged, double unrounded, double reach) {
    const auto want = static_cast<double>(bf16_of(staged));
    ++elements;
    equal += got == want;
    told_apart += bf16_of(static_cast<float>(unrounded)) != want;
    // Sums in two orders round to the same bf16 or to neighbours.
    if (std::fabs(got - want) > bf16_unit(std::max(std::fabs(got), std::fabs(want))) + reach && ++wrong < 4)
      ADD_FAILURE() << got << ", wanted " << want;
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_GE(equal, elements * 98 / 100);       // few sums lie near a tie
  EXPECT_GE(told_apart, elements * 20 / 100);  // the test can see the staging: unrounded operands give other numbers
}

// Without decay e^G is 1. With the identity or the difference operator as the inverse, every sum has at most two terms, so its
// rounding does not depend on the order: all bits must be equal.
inline void expect_exact_wu(const Stream& stream) {
  for (double ones : {0.0, 1.0}) {
    WuContract wu({.lengths = {70, 5}, .Hv = 2, .K = 24, .V = 20, .dtype = DType::bf16, .g_low = 0, .beta_high = 2}, 64);
    cases::fill(wu.args.a_inv, ones);  // (I + A)^-1 of zeros, or of ones below the diagonal
    chunk_tri_inverse(cases::kReference, {wu.args.a_inv, wu.args.a_inv, wu.args.sequences, 64});
    wu.run(stream);
    int wrong = 0;
    wu.each([&](double got, float staged, double, double) {
      if (got != static_cast<double>(bf16_of(staged)) && ++wrong < 4) ADD_FAILURE() << got << ", wanted " << bf16_of(staged);
    });
    EXPECT_EQ(wrong, 0);
  }
}

}  // namespace weft::tests
