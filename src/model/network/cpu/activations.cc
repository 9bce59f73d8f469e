// Row operations between GEMMs on the cpu, with threads over rows: see activations.h.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "model/network/cpu/activations.cc"
#include "cpu/runner-inl.h"
// clang-format on
#include "model/network/cpu/activations-inl.h"

#if HWY_ONCE

#include <algorithm>

#include "model/network/cpu/activations.h"

namespace weft::model {

HWY_EXPORT(rms_norm_row);
HWY_EXPORT(rotate_row);
HWY_EXPORT(sigmoid_gate_row);
HWY_EXPORT(swiglu_row);
HWY_EXPORT(add_scaled_row);
HWY_EXPORT(log_sum_exp_row);

namespace {

// Calls work(row) for every row. A task takes several rows to outweigh its scheduling cost; about ten operations per number.
template <class F>
void for_rows(const Stream& stream, int64_t rows, int64_t numbers, F&& work) {
  const int64_t step = std::clamp<int64_t>(16384 / std::max<int64_t>(1, numbers), 1, std::max<int64_t>(1, rows));
  const int threads =
      cpu::worth_threads(cpu::thread_count(stream), 10.0 * static_cast<double>(rows) * static_cast<double>(numbers));
  cpu::parallel_for(threads, (rows + step - 1) / step, [&](int64_t i, int) {
    for (int64_t r = i * step; r < std::min(rows, (i + 1) * step); ++r) work(r);
  });
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

void rms_norm(const Stream& stream, int64_t count, int64_t size, StridedRows x, const float* weight, float eps, StridedRows y) {
  const auto kernel = WEFT_KERNEL(stream.isa, rms_norm_row);
  for_rows(stream, count, size, [&](int64_t r) { kernel(x.data + r * x.stride, size, weight, eps, y.data + r * y.stride); });
}

void norm_and_rotate(const Stream& stream, const HeadRotation& args) {
  const auto norm = WEFT_KERNEL(stream.isa, rms_norm_row);
  const auto rotate = WEFT_KERNEL(stream.isa, rotate_row);
  for_rows(stream, args.tokens, args.heads * args.size, [&](int64_t t) {
    for (int64_t h = 0; h < args.heads; ++h) {
      float* x = args.x.data + t * args.x.stride + h * args.head_stride;
      norm(x, args.size, args.weight, args.eps, x);
      rotate(x, args.half, args.cosine + t * args.half, args.sine + t * args.half);
    }
  });
}

void sigmoid_gate(const Stream& stream, int64_t tokens, int64_t heads, int64_t size, HeadRows x, HeadRows gate, HeadRows y) {
  const auto kernel = WEFT_KERNEL(stream.isa, sigmoid_gate_row);
  const auto at = [](const HeadRows& h, int64_t t, int64_t head) { return h.rows.data + t * h.rows.stride + head * h.head; };
  for_rows(stream, tokens, heads * size, [&](int64_t t) {
    for (int64_t h = 0; h < heads; ++h) kernel(at(x, t, h), at(gate, t, h), size, at(y, t, h));
  });
}

void swiglu(const Stream& stream, int64_t count, int64_t size, StridedRows x, StridedRows y) {
  const auto kernel = WEFT_KERNEL(stream.isa, swiglu_row);
  for_rows(stream, count, size, [&](int64_t r) { kernel(x.data + r * x.stride, size, y.data + r * y.stride); });
}

void add_gated(const Stream& stream, int64_t count, int64_t size, StridedRows x, StridedRows gate, StridedRows y) {
  const auto kernel = WEFT_KERNEL(stream.isa, add_scaled_row);
  for_rows(stream, count, size,
           [&](int64_t r) { kernel(x.data + r * x.stride, size, sigmoid(gate.data[r * gate.stride]), y.data + r * y.stride); });
}

void add_scaled(const Stream& stream, int64_t size, const float* x, float weight, float* y) {
  WEFT_KERNEL(stream.isa, add_scaled_row)(x, size, weight, y);
}

void add_bias(const Stream& stream, int64_t count, int64_t size, StridedRows x, const float* bias) {
  const auto kernel = WEFT_KERNEL(stream.isa, add_scaled_row);
  for_rows(stream, count, size, [&](int64_t r) { kernel(bias, size, 1.0f, x.data + r * x.stride); });
}

double log_sum_exp(const Stream& stream, const float* x, int64_t size) { return WEFT_KERNEL(stream.isa, log_sum_exp_row)(x, size); }

}  // namespace weft::model

#endif  // HWY_ONCE
