// Token steps of the gated delta rule on one state, in place: decode and replay. Every state element is read once and written once.
// Included once per target, after foreach_target.h.
//
// A block of the state (four rows of V, or a strip of columns when the state is [K, V]) stays in the first-level cache for all tokens
// of the call. With a = e^g, per token:  r = S (a k),  e = beta (v - r),  S = a S + e k,  o = S_before (a q) + (q . k) e.
// Decode and replay share fold(), so that replay leaves the bits that decode would have left.
#if defined(WEFT_CPU_DELTA_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_DELTA_STEP_INL_H_
#undef WEFT_CPU_DELTA_STEP_INL_H_
#else
#define WEFT_CPU_DELTA_STEP_INL_H_
#endif

#include <hwy/cache_control.h>

#include "cpu/delta_step.h"
#include "cpu/gates-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

constexpr int64_t kStepRows = 4;              // rows of V in a block of a [V, K] state
constexpr int64_t kStepColumns = 2 * kLanes;  // columns in a strip of a [K, V] state
constexpr int64_t kMaxHead = kMaxDeltaHeadSize;
constexpr int64_t kPaddedHead = kMaxHead + kStepColumns;

// Token rows of one head, padded with zeros to whole vectors.
struct StepTokens {
  HWY_ALIGN float k[kMaxDecodeTokens * kMaxHead];       // as used by the rule
  HWY_ALIGN float k_read[kMaxDecodeTokens * kMaxHead];  // a k
  HWY_ALIGN float q_read[kMaxDecodeTokens * kMaxHead];  // scale a q
  HWY_ALIGN float decay[kMaxDecodeTokens * kMaxHead];   // a, per channel
  HWY_ALIGN float v[kMaxDecodeTokens * kPaddedHead];
  HWY_ALIGN float delta[kMaxDecodeTokens * kPaddedHead];
  HWY_ALIGN float o[kMaxDecodeTokens * kPaddedHead];
  HWY_ALIGN float beta[kMaxDecodeTokens + kLanes], qk[kMaxDecodeTokens];  // qk: scale q . k
  HWY_ALIGN float g[kMaxDecodeTokens + kLanes], bias[kMaxHead];
  HWY_ALIGN float block[kMaxHead * kStepColumns > kStepRows* kMaxHead ? kMaxHead* kStepColumns : kStepRows* kMaxHead];
};

// Rows of a state as they are stored, a vector of f32 at a time. The three look alike to the kernels.
struct F32Rows {
  float* data;
  int64_t stride;
  HWY_INLINE VF load(int64_t row, int64_t i) const { return hn::LoadU(F32(), data + row * stride + i); }
  HWY_INLINE void store(int64_t row, int64_t i, VF x) const { hn::StoreU(x, F32(), data + row * stride + i); }
};
struct F16Rows {
  uint16_t* data;
  int64_t stride;
  HWY_INLINE VF load(int64_t row, int64_t i) const { return load_f16(data + row * stride + i); }
  HWY_INLINE void store(int64_t row, int64_t i, VF x) const { store_f16(x, data + row * stride + i); }
};
struct Bf16Rows {
  uint16_t* data;
  int64_t stride;
  HWY_INLINE VF load(int64_t row, int64_t i) const { return load_bf16(data + row * stride + i); }
  HWY_INLINE void store(int64_t row, int64_t i, VF x) const { store_bf16(x, data + row * stride + i); }
};

template <class F>
HWY_INLINE void with_rows(DType dtype, void* data, int64_t offset, int64_t stride, F&& use) {
  if (dtype == DType::f32)
    use(F32Rows{static_cast<float*>(data) + offset, stride});
  else if (dtype == DType::f16)
    use(F16Rows{static_cast<uint16_t*>(data) + offset, stride});
  else
    use(Bf16Rows{static_cast<uint16_t*>(data) + offset, stride});
}

// S = a S + e k over whole vectors of one row: all that ever happens to a [V, K] state.
template <class From, class To>
HWY_INLINE void fold_row(const From& from, const To& to, int64_t row, const float* decay, const float* k, VF e, int64_t count) {
  const F32 d;
  for (int64_t i = 0; i < count; i += kLanes)
    to.store(row, i, hn::MulAdd(e, hn::LoadU(d, k + i), hn::Mul(hn::LoadU(d, decay + i), from.load(row, i))));
}

// One token on up to kStepRows rows of V of a [V, K] state.
template <class From, class To>
HWY_NOINLINE void step_rows(StepTokens& m, int64_t t, int64_t k_stride, int64_t v, const From& from, const To& to, int64_t rows,
                            bool recorded) {
  const F32 d;
  HWY_ALIGN float e[kStepRows];
  if (recorded) {
    for (int64_t r = 0; r < rows; ++r) e[r] = m.delta[t * kPaddedHead + v + r];
  } else {
    const float *k = m.k_read + t * k_stride, *q = m.q_read + t * k_stride;
    VF read_k[kStepRows], read_q[kStepRows];
    WEFT_UNROLL for (int r = 0; r < kStepRows; ++r) read_k[r] = read_q[r] = hn::Zero(d);
    for (int64_t i = 0; i < k_stride; i += kLanes) {
      const VF kv = hn::LoadU(d, k + i), qv = hn::LoadU(d, q + i);
      WEFT_UNROLL for (int64_t r = 0; r < kStepRows; ++r) {
        // A block short of rows repeats its last one; the surplus results are not used.
        const VF s = from.load(HWY_MIN(r, rows - 1), i);
        read_k[r] = hn::MulAdd(s, kv, read_k[r]);
        read_q[r] = hn::MulAdd(s, qv, read_q[r]);
      }
    }
    HWY_ALIGN float sum_k[kStepRows], sum_q[kStepRows];
    sum_lanes4(read_k, sum_k);
    sum_lanes4(read_q, sum_q);
    for (int64_t r = 0; r < rows; ++r) {
      e[r] = m.beta[t] * (m.v[t * kPaddedHead + v + r] - sum_k[r]);
      m.delta[t * kPaddedHead + v + r] = e[r];
      m.o[t * kPaddedHead + v + r] = sum_q[r] + m.qk[t] * e[r];
    }
  }
  for (int64_t r = 0; r < rows; ++r) fold_row(from, to, r, m.decay + t * k_stride, m.k + t * k_stride, hn::Set(d, e[r]), k_stride);
}

// A strip of a [K, V] state, rows of kStepColumns numbers.
HWY_INLINE void step_strip(StepTokens& m, int64_t t, int64_t k_stride, int64_t K, int64_t v, float* strip, bool recorded) {
  const F32 d;
  float* delta = m.delta + t * kPaddedHead + v;
  if (!recorded) {
    VF read_k[2] = {hn::Zero(d), hn::Zero(d)}, read_q[2] = {hn::Zero(d), hn::Zero(d)};
    for (int64_t p = 0; p < K; ++p) {
      const VF kv = hn::Set(d, m.k_read[t * k_stride + p]), qv = hn::Set(d, m.q_read[t * k_stride + p]);
      WEFT_UNROLL for (int n = 0; n < 2; ++n) {
        const VF s = hn::LoadU(d, strip + p * kStepColumns + n * kLanes);
        read_k[n] = hn::MulAdd(s, kv, read_k[n]);
        read_q[n] = hn::MulAdd(s, qv, read_q[n]);
      }
    }
    const VF beta = hn::Set(d, m.beta[t]), qk = hn::Set(d, m.qk[t]);
    WEFT_UNROLL for (int n = 0; n < 2; ++n) {
      const VF e = hn::Mul(beta, hn::Sub(hn::LoadU(d, m.v + t * kPaddedHead + v + n * kLanes), read_k[n]));
      hn::StoreU(e, d, delta + n * kLanes);
      hn::StoreU(hn::MulAdd(qk, e, read_q[n]), d, m.o + t * kPaddedHead + v + n * kLanes);
    }
  }
  for (int64_t p = 0; p < K; ++p) {
    const VF decay = hn::Set(d, m.decay[t * k_stride + p]), k = hn::Set(d, m.k[t * k_stride + p]);
    WEFT_UNROLL for (int n = 0; n < 2; ++n) {
      float* s = strip + p * kStepColumns + n * kLanes;
      hn::StoreU(hn::MulAdd(hn::LoadU(d, delta + n * kLanes), k, hn::Mul(decay, hn::LoadU(d, s))), d, s);
    }
  }
}

// The state of one head through all its tokens. in_base or out_base < 0: zeros, or not written.
HWY_INLINE void step_state(StepTokens& m, const DeltaStep& step, int64_t count, int64_t k_stride, int64_t in_base,
                           int64_t out_base) {
  const int64_t K = step.heads.K, V = step.heads.V;
  const bool recorded = step.replay;
  if (step.layout == StateLayout::kv) {
    for (int64_t v = 0; v < V; v += kStepColumns) {
      const int64_t real = HWY_MIN(kStepColumns, V - v);
      for (int64_t p = 0; p < K; ++p) {
        float* row = m.block + p * kStepColumns;
        if (in_base >= 0) unpack_row(step.in.dtype, step.in.data, in_base + p * V + v, real, row);
        fill_row(row + (in_base >= 0 ? real : 0), kStepColumns - (in_base >= 0 ? real : 0), 0);
      }
      for (int64_t t = 0; t < count; ++t) step_strip(m, t, k_stride, K, v, m.block, recorded);
      for (int64_t p = 0; p < K && out_base >= 0; ++p)
        pack_row(m.block + p * kStepColumns, real, step.out.dtype, step.out.data, out_base + p * V + v);
    }
    return;
  }
  // Rows of whole vectors are stepped where they lie, the first token reading the old state and the last writing the new; between
  // tokens, and for other rows, the block holds them as f32.
  const bool whole = K % kLanes == 0, direct_in = in_base >= 0 && whole, direct_out = out_base >= 0 && whole;
  const F32Rows block{m.block, k_stride};
  for (int64_t v = 0; v < V; v += kStepRows) {
    const int64_t rows = HWY_MIN(kStepRows, V - v), in_row = in_base + v * K, out_row = out_base + v * K;
    if (direct_in) {
      // Hardware prefetchers stop at page ends; three blocks ahead keeps the next page coming.
      const auto bytes = static_cast<uintptr_t>(rows * K * dtype_bytes(step.in.dtype));
      const auto ahead =
          reinterpret_cast<uintptr_t>(step.in.data) + static_cast<uintptr_t>(in_row * dtype_bytes(step.in.dtype)) + 4 * bytes;
      for (uintptr_t line = 0; line < bytes; line += 64) hwy::Prefetch(reinterpret_cast<const float*>(ahead + line));
    }
    if (!direct_in || count == 0) {
      for (int64_t r = 0; r < rows; ++r) {
        float* row = m.block + r * k_stride;
        if (in_base >= 0) unpack_row(step.in.dtype, step.in.data, in_row + r * K, K, row);
        fill_row(row + (in_base >= 0 ? K : 0), k_stride - (in_base >= 0 ? K : 0), 0);
      }
    }
    for (int64_t t = 0; t < count; ++t) {
      const auto run = [&](const auto& from, const auto& to) HWY_ATTR { step_rows(m, t, k_stride, v, from, to, rows, recorded); };
      const bool reads_state = direct_in && t == 0, writes_state = direct_out && t + 1 == count;
      const auto run_from = [&](const auto& from) HWY_ATTR {
        if (writes_state)
          with_rows(step.out.dtype, step.out.data, out_row, K, [&](const auto& to) HWY_ATTR { run(from, to); });
        else
          run(from, block);
      };
      if (reads_state)
        with_rows(step.in.dtype, step.in.data, in_row, K, run_from);
      else
        run_from(block);
    }
    if (out_base >= 0 && (!direct_out || count == 0))
      for (int64_t r = 0; r < rows; ++r) pack_row(m.block + r * k_stride, K, step.out.dtype, step.out.data, out_row + r * K);
  }
}

size_t delta_step_bytes() { return sizeof(StepTokens); }

// Tokens [begin, begin + count) of a sequence for value head hv.
void delta_step(const DeltaStep& step, int64_t begin, int64_t count, int64_t hv, int64_t in_slot, int64_t out_slot, void* memory) {
  const F32 d;
  StepTokens& m = *static_cast<StepTokens*>(memory);
  const int64_t K = step.heads.K, V = step.heads.V, k_stride = round_up(K, kLanes), hk = step.heads.key_head(hv);
  const GateView& gates = step.gates;
  if (!gates.per_channel) log_decays(gates, begin, count, hv, m.g);
  if (!step.replay) strengths(gates, begin, count, hv, m.beta);
  for (int64_t t = 0; t < count; ++t) {
    float *k = m.k + t * k_stride, *decay = m.decay + t * k_stride;
    load_key_row(step.k, begin + t, hk, K, k_stride, step.l2_norm, k);
    if (gates.per_channel)
      log_decay_row(gates, begin + t, hv, K, m.bias, decay);
    else
      fill_row(decay, k_stride, m.g[t]);
    if (step.record_g.data) {
      if (gates.per_channel)
        pack_row(decay, K, DType::f32, step.record_g.data, step.record_g.at(begin + t, hv));
      else
        store_one(DType::f32, step.record_g.data, step.record_g.at(begin + t, hv), m.g[t]);
    }
    exp_all(decay, k_stride);
    float* rows = step.replay ? m.delta : m.v;
    unpack_row(step.v.dtype, step.v.data, step.v.at(begin + t, hv), V, rows + t * kPaddedHead);
    fill_row(rows + t * kPaddedHead + V, kPaddedHead - V, 0);
    if (step.replay) continue;
    // The first value head of a group writes the key that they share.
    if (step.record_k.data && step.heads.value_head(hk, 0) == hv)
      pack_row(k, K, DType::f32, step.record_k.data, step.record_k.at(begin + t, hk));
    float *k_read = m.k_read + t * k_stride, *q_read = m.q_read + t * k_stride;
    load_key_row(step.q, begin + t, hk, K, k_stride, step.l2_norm, q_read);
    m.qk[t] = step.scale * dot_padded(q_read, k, k_stride);
    for (int64_t i = 0; i < k_stride; i += kLanes) {
      const VF a = hn::LoadU(d, decay + i);
      hn::StoreU(hn::Mul(a, hn::LoadU(d, k + i)), d, k_read + i);
      hn::StoreU(hn::Mul(hn::Set(d, step.scale), hn::Mul(a, hn::LoadU(d, q_read + i))), d, q_read + i);
    }
  }
  step_state(m, step, count, k_stride, in_slot >= 0 ? step.in.at(in_slot, hv) : -1, out_slot >= 0 ? step.out.at(out_slot, hv) : -1);
  if (step.replay) return;
  for (int64_t t = 0; t < count; ++t) {
    pack_row(m.o + t * kPaddedHead, V, step.o.dtype, step.o.data, step.o.at(begin + t, hv));
    if (step.record_delta.data)
      pack_row(m.delta + t * kPaddedHead, V, DType::f32, step.record_delta.data, step.record_delta.at(begin + t, hv));
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
