// Decays and write strengths of tokens, vectorised, from any input form (DecayForm).
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_GATES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_GATES_INL_H_
#undef WEFT_CPU_GATES_INL_H_
#else
#define WEFT_CPU_GATES_INL_H_
#endif

#include "common/conventions.h"
#include "cpu/common/simd-inl.h"
#include "cpu/delta/delta_params.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// g = -exp(a_log) softplus(a + bias)
HWY_INLINE VF log_decay(VF a, VF bias, VF a_log) {
  const F32 d;
  return hn::Neg(hn::Mul(hn::Exp(d, a_log), softplus(hn::Add(a, bias))));
}

// Converts `count` decay inputs of any form to log decays, in place. The array is padded to kLanes.
HWY_INLINE void to_log_decay(const GateView& gates, int64_t hv, const float* bias, bool one_bias, float* x, int64_t count) {
  const F32 d;
  if (gates.form == DecayForm::log) return;
  const VF a_log = hn::Set(d, gates.form == DecayForm::raw ? gates.a_log[hv * gates.a_log_stride] : 0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    VF v = hn::LoadU(d, x + i);
    if (gates.form == DecayForm::raw) {
      v = log_decay(v, one_bias ? hn::Set(d, bias[0]) : hn::LoadU(d, bias + i), a_log);
    } else {  // a decay of 0 (and anything below 2^-126) has the log -infinity
      const VF tiny = hn::Set(d, 0x1p-126f);
      v = hn::IfThenElse(hn::Ge(v, tiny), hn::Log(d, hn::Max(v, tiny)), hn::Set(d, -INFINITY));
    }
    hn::StoreU(v, d, x + i);
  }
}

// Log decays of tokens [t, t + count), one number per token: out[count], padded to kLanes with 0 (no decay).
HWY_INLINE void log_decays(const GateView& gates, int64_t t, int64_t count, int64_t hv, float* out) {
  const int64_t padded = round_up(count, kLanes);
  for (int64_t i = 0; i < count; ++i) out[i] = load_one(gates.decay.dtype, gates.decay.data, gates.decay.at(t + i, hv));
  for (int64_t i = count; i < padded; ++i) out[i] = 1;  // finite in every form
  float bias = 0;
  if (gates.form == DecayForm::raw) bias = gates.dt_bias[hv * gates.dt_bias_stride];
  to_log_decay(gates, hv, &bias, true, out, padded);
  for (int64_t i = count; i < padded; ++i) out[i] = 0;
}

// Per-channel log decays of one token: out[K], padded to kLanes with 0. `bias` is scratch of the same size.
HWY_INLINE void log_decay_row(const GateView& gates, int64_t t, int64_t hv, int64_t K, float* bias, float* out) {
  const int64_t padded = round_up(K, kLanes);
  unpack_row(gates.decay.dtype, gates.decay.data, gates.decay.at(t, hv), K, out);
  fill_row(out + K, padded - K, 1);
  if (gates.form == DecayForm::raw) {
    unpack_row(DType::f32, gates.dt_bias, hv * gates.dt_bias_stride, K, bias);
    fill_row(bias + K, padded - K, 0);
  }
  to_log_decay(gates, hv, bias, false, out, padded);
  fill_row(out + K, padded - K, 0);
}

// x = e^x in place, for log decays. The array is padded to kLanes.
HWY_INLINE void exp_all(float* x, int64_t count) {
  const F32 d;
  for (int64_t i = 0; i < count; i += kLanes) hn::StoreU(exp_nonpositive(hn::LoadU(d, x + i)), d, x + i);
}

// Write strengths of tokens [t, t + count): out[count], padded to kLanes with 0.
HWY_INLINE void strengths(const GateView& gates, int64_t t, int64_t count, int64_t hv, float* out) {
  const F32 d;
  const int64_t padded = round_up(count, kLanes);
  for (int64_t i = 0; i < count; ++i) out[i] = load_one(gates.strength.dtype, gates.strength.data, gates.strength.at(t + i, hv));
  fill_row(out + count, padded - count, 0);
  if (!gates.raw_strength) return;
  const VF factor = hn::Set(d, gates.strength_factor);
  for (int64_t i = 0; i < padded; i += kLanes) hn::StoreU(hn::Mul(factor, sigmoid(hn::LoadU(d, out + i))), d, out + i);
  fill_row(out + count, padded - count, 0);
}

// Loads a key or query row as f32, padded with zeros to `padded` numbers, l2-normalised if asked.
HWY_INLINE void load_key_row(const RowsView& rows, int64_t t, int64_t h, int64_t K, int64_t padded, bool l2_norm, float* out) {
  const F32 d;
  unpack_row(rows.dtype, rows.data, rows.at(t, h), K, out);
  fill_row(out + K, padded - K, 0);
  if (!l2_norm) return;
  const VF factor = hn::Set(d, 1.0f / std::sqrt(dot_padded(out, out, padded) + kKeyNormEps<float>));
  for (int64_t i = 0; i < padded; i += kLanes) hn::StoreU(hn::Mul(factor, hn::LoadU(d, out + i)), d, out + i);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
