// Kernels of activations.h, a row at a time.
// Included once per target, after foreach_target.h.
#if defined(WEFT_MODEL_ACTIVATIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_MODEL_ACTIVATIONS_INL_H_
#undef WEFT_MODEL_ACTIVATIONS_INL_H_
#else
#define WEFT_MODEL_ACTIVATIONS_INL_H_
#endif

#include "cpu/runner-inl.h"
#include "model/network/cpu/activations.h"

HWY_BEFORE_NAMESPACE();
namespace weft::model::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using namespace weft::cpu::HWY_NAMESPACE;  // NOLINT: the vector functions of this target

// A vector of a row: `live` <= kLanes numbers from number i on. Loads fill the other lanes with zeros.
struct Lanes {
  int64_t i, live;

  HWY_INLINE VF load(const float* p) const {
    if (live == kLanes) return hn::LoadU(F32(), p + i);
    HWY_ALIGN float lanes[kLanes] = {};
    for (int64_t j = 0; j < live; ++j) lanes[j] = p[i + j];
    return hn::Load(F32(), lanes);
  }
  HWY_INLINE void store(VF v, float* p) const {
    if (live == kLanes) return hn::StoreU(v, F32(), p + i);
    HWY_ALIGN float lanes[kLanes];
    hn::Store(v, F32(), lanes);
    for (int64_t j = 0; j < live; ++j) p[i + j] = lanes[j];
  }
};

// Calls body for every vector of [0, size). The last vector may be partial.
template <class F>
HWY_INLINE void for_lanes(int64_t size, F&& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(Lanes{i, kLanes});
  if (i < size) body(Lanes{i, size - i});
}

void rms_norm_row(const float* x, int64_t size, const float* weight, float eps, float* y) {
  const F32 d;
  VF sum = hn::Zero(d);
  for_lanes(size, [&](Lanes l) {
    const VF v = l.load(x);
    sum = hn::MulAdd(v, v, sum);
  });
  const float mean = hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<float>(size);
  const VF scale = hn::Set(d, 1.0f / std::sqrt(mean + eps));
  for_lanes(size, [&](Lanes l) { l.store(hn::Mul(hn::Mul(l.load(x), scale), l.load(weight)), y); });
}

void rotate_row(float* x, int64_t half, const float* cosine, const float* sine) {
  for_lanes(half, [&](Lanes l) {
    const VF a = l.load(x), b = l.load(x + half), c = l.load(cosine), s = l.load(sine);
    l.store(hn::NegMulAdd(b, s, hn::Mul(a, c)), x);
    l.store(hn::MulAdd(a, s, hn::Mul(b, c)), x + half);
  });
}

void sigmoid_gate_row(const float* x, const float* gate, int64_t size, float* y) {
  for_lanes(size, [&](Lanes l) { l.store(hn::Mul(l.load(x), sigmoid(l.load(gate))), y); });
}

void swiglu_row(const float* x, int64_t size, float* y) {
  for_lanes(size, [&](Lanes l) { l.store(hn::Mul(silu(l.load(x)), l.load(x + size)), y); });
}

void add_scaled_row(const float* x, int64_t size, float weight, float* y) {
  const VF w = hn::Set(F32(), weight);
  for_lanes(size, [&](Lanes l) { l.store(hn::MulAdd(w, l.load(x), l.load(y)), y); });
}

double log_sum_exp_row(const float* x, int64_t size) {
  const F32 d;
  float top = x[0];
  for (int64_t i = 1; i < size; ++i) top = x[i] > top ? x[i] : top;
  const VF highest = hn::Set(d, top);
  // Sums of 4096 numbers in f32 lanes, accumulated in double, so that large vocabularies lose no precision.
  double total = 0;
  for (int64_t first = 0; first < size; first += 4096) {
    VF sum = hn::Zero(d);
    const int64_t count = size - first < 4096 ? size - first : 4096;
    for_lanes(count, [&](Lanes l) {
      const VF e = exp_nonpositive(hn::Sub(l.load(x + first), highest));
      sum = hn::Add(sum, l.live == kLanes ? e : hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(l.live)), e));
    });
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
  return static_cast<double>(top) + std::log(total);
}

}  // namespace weft::model::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
