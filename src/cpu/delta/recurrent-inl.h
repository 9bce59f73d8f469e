// Recurrent steps of the gated delta rule (decode and replay): every state element is read once and written once.
// Included once per target, after foreach_target.h.
//
// A block of the state stays in the first-level cache for all tokens of the call. The block is two rows of V (more with several
// tokens), or a strip of columns if the state is [K, V]. With a = e^g, per token:
//   r = S (a k),  e = beta (v - r),  o = S (a q) + (q . k) e,  S = a S + e k.
// Decode and replay share updated(), so that replay gives the same bits as decode.
#if defined(WEFT_CPU_RECURRENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_RECURRENT_INL_H_
#undef WEFT_CPU_RECURRENT_INL_H_
#else
#define WEFT_CPU_RECURRENT_INL_H_
#endif

#include <type_traits>

#include "cpu/delta/gates-inl.h"
#include "cpu/delta/recurrent.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

constexpr int kStepRows = 2;  // rows of V in a block of a [V, K] state
// The same with several tokens. Each token depends on the one before, so more rows are needed to hide the latency. The sums of a
// token stay in registers: two vectors per row.
constexpr int kMultiTokenRows = HWY_MAX_BYTES >= 64 || HWY_ARCH_ARM_A64 ? 8 : 4;
constexpr int64_t kStepColumns = 2 * kLanes;  // columns in a strip of a [K, V] state
constexpr int64_t kMaxHead = kMaxDeltaHeadSize;
constexpr int64_t kPaddedHead = kMaxHead + HWY_MAX(kStepColumns, round_up(kMultiTokenRows, kLanes));

// The rows of a token along the key axis, contiguous. If they were 4096 bytes apart, they would alias each other and the state
// where a processor compares only low address bits (4K aliasing).
struct KeyRows {
  float *k, *k_read, *q_read, *decay;  // k, normalised if asked; a k; scale a q; a, per channel
};

// Scratch of one head: the rows of its tokens, padded with zeros to whole vectors, and a block of the state.
struct StepTokens {
  HWY_ALIGN float keys[4 * kMaxDecodeTokens * kMaxHead];
  HWY_ALIGN float v[kMaxDecodeTokens * kPaddedHead];
  HWY_ALIGN float delta[kMaxDecodeTokens * kPaddedHead];
  HWY_ALIGN float o[kMaxDecodeTokens * kPaddedHead];
  HWY_ALIGN float beta[kMaxDecodeTokens + kLanes], qk[kMaxDecodeTokens];  // qk: scale q . k
  HWY_ALIGN float g[kMaxDecodeTokens + kLanes], bias[kMaxHead];
  HWY_ALIGN float block[kMaxHead * HWY_MAX(kStepColumns, kMultiTokenRows)];
};

HWY_INLINE KeyRows key_rows(StepTokens& m, int64_t t, int64_t k_stride) {
  float* first = m.keys + 4 * t * k_stride;
  return {first, first + k_stride, first + 2 * k_stride, first + 3 * k_stride};
}

// The state update S = a S + e k.
HWY_INLINE VF updated(VF s, VF decay, VF e, VF k) { return hn::MulAdd(e, k, hn::Mul(decay, s)); }

// Computes the correction e and the output of token t for one row of V, from the row's products with k and q. `at` indexes m.v,
// m.delta and m.o.
HWY_INLINE VF write_row(StepTokens& m, int64_t t, int64_t at, float by_k, float by_q) {
  const float delta = m.beta[t] * (m.v[at] - by_k);
  m.delta[at] = delta;
  m.o[at] = by_q + m.qk[t] * delta;
  return hn::Set(F32(), delta);
}

// One token on one or two rows of V of a [V, K] state. kVectors > 0: rows have that many vectors, and two rows stay in registers,
// so that the state is loaded once. kVectors 0: rows of any length, and recorded tokens too. With two rows and no more, hardware
// prefetchers see one stream.
template <int kVectors, class Rows>
HWY_INLINE void step_rows(StepTokens& m, int64_t t, int64_t k_stride, int64_t v, const Rows& from, const Rows& to, int64_t rows,
                          bool recorded) {
  const F32 d;
  constexpr bool kHeld = kVectors > 0;
  const int64_t vectors = kHeld ? kVectors : k_stride / kLanes;
  const KeyRows keys = key_rows(m, t, vectors * kLanes);
  const int64_t at = t * kPaddedHead + v;
  VF held[kStepRows][kHeld ? kVectors : 1], e[kStepRows];
  if (!kHeld && recorded) {
    WEFT_UNROLL for (int r = 0; r < kStepRows; ++r) e[r] = hn::Set(d, m.delta[at + r]);
  } else {
    VF reads[2 * kStepRows];
    WEFT_UNROLL for (VF& read : reads) read = hn::Zero(d);
    const auto read = [&](int64_t i) HWY_ATTR {
      const VF k = hn::LoadU(d, keys.k_read + i * kLanes), q = hn::LoadU(d, keys.q_read + i * kLanes);
      WEFT_UNROLL for (int64_t r = 0; r < kStepRows; ++r) {
        // A single row is read twice; the second result goes to padding.
        const VF s = from.load(HWY_MIN(r, rows - 1), i * kLanes);
        if constexpr (kHeld) held[r][i] = s;
        reads[r] = hn::MulAdd(s, k, reads[r]);
        reads[kStepRows + r] = hn::MulAdd(s, q, reads[kStepRows + r]);
      }
    };
    if constexpr (kHeld) {
      WEFT_UNROLL for (int i = 0; i < kVectors; ++i) read(i);
    } else {
      for (int64_t i = 0; i < vectors; ++i) read(i);
    }
    HWY_ALIGN float sums[2 * kStepRows];
    sum_lanes4(reads, sums);
    WEFT_UNROLL for (int r = 0; r < kStepRows; ++r) e[r] = write_row(m, t, at + r, sums[r], sums[kStepRows + r]);
  }
  const auto update = [&](int64_t i, int64_t r, auto store) HWY_ATTR {
    VF s;
    if constexpr (kHeld)
      s = held[r][i];
    else
      s = from.load(r, i * kLanes);
    store(r, i * kLanes, updated(s, hn::LoadU(d, keys.decay + i * kLanes), e[r], hn::LoadU(d, keys.k + i * kLanes)));
  };
  const auto update_all = [&](auto store) HWY_ATTR {
    if constexpr (kHeld) {
      WEFT_UNROLL for (int i = 0; i < kVectors; ++i) {
        update(i, 0, store);
        if (rows == kStepRows) update(i, 1, store);
      }
    } else {
      for (int64_t i = 0; i < vectors; ++i) {
        update(i, 0, store);
        if (rows == kStepRows) update(i, 1, store);
      }
    }
  };
  // If the corrections are finite, no NaN is written: a NaN or infinity in the row, the key or the decay would have made them
  // non-finite.
  if constexpr (kHeld && std::is_same_v<Rows, Bf16Rows>) {
    if (std::isfinite(m.delta[at]) && std::isfinite(m.delta[at + 1]))
      return update_all([&](int64_t r, int64_t i, VF s) HWY_ATTR { to.store_no_nan(r, i, s); });
  }
  update_all([&](int64_t r, int64_t i, VF s) HWY_ATTR { to.store(r, i, s); });
}

// One token on a strip of a [K, V] state: rows of kStepColumns numbers.
HWY_INLINE void step_strip(StepTokens& m, int64_t t, int64_t k_stride, int64_t K, int64_t v, float* strip, bool recorded) {
  const F32 d;
  const KeyRows keys = key_rows(m, t, k_stride);
  float* delta = m.delta + t * kPaddedHead + v;
  if (!recorded) {
    VF read_k[2] = {hn::Zero(d), hn::Zero(d)}, read_q[2] = {hn::Zero(d), hn::Zero(d)};
    for (int64_t p = 0; p < K; ++p) {
      const VF kv = hn::Set(d, keys.k_read[p]), qv = hn::Set(d, keys.q_read[p]);
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
    const VF decay = hn::Set(d, keys.decay[p]), k = hn::Set(d, keys.k[p]);
    WEFT_UNROLL for (int n = 0; n < 2; ++n) {
      float* s = strip + p * kStepColumns + n * kLanes;
      hn::StoreU(updated(hn::LoadU(d, s), decay, hn::LoadU(d, delta + n * kLanes), k), d, s);
    }
  }
}

// All tokens on a [K, V] state. in_base < 0: the state starts as zeros. out_base < 0: it is not written. The same holds below.
HWY_INLINE void step_kv_state(StepTokens& m, const RecurrentStep& step, int64_t count, int64_t k_stride, int64_t in_base,
                              int64_t out_base) {
  const int64_t K = step.heads.K, V = step.heads.V;
  for (int64_t v = 0; v < V; v += kStepColumns) {
    const int64_t real = HWY_MIN(kStepColumns, V - v);
    for (int64_t p = 0; p < K; ++p) {
      float* row = m.block + p * kStepColumns;
      if (in_base >= 0) unpack_row(step.in.dtype, step.in.data, in_base + p * V + v, real, row);
      fill_row(row + (in_base >= 0 ? real : 0), kStepColumns - (in_base >= 0 ? real : 0), 0);
    }
    for (int64_t t = 0; t < count; ++t) step_strip(m, t, k_stride, K, v, m.block, step.replay);
    for (int64_t p = 0; p < K && out_base >= 0; ++p)
      pack_row(m.block + p * kStepColumns, real, step.out.dtype, step.out.data, out_base + p * V + v);
  }
}

// One token on a [V, K] state whose rows are whole vectors, without a copy.
template <int kVectors, class Rows>
HWY_INLINE void step_vk_in_place(StepTokens& m, int64_t k_stride, int64_t V, const Rows& in, const Rows& out, bool recorded) {
  for (int64_t v = 0; v < V; v += kStepRows)
    step_rows<kVectors>(m, 0, k_stride, v, in.from(v), out.from(v), HWY_MIN(kStepRows, V - v), recorded);
}

// A range that a loop prefetches a few lines at a time: all lines at once would delay the loop's own loads.
struct Prefetcher {
  const char *at = nullptr, *end = nullptr;
  HWY_INLINE void prefetch_some() {
    for (int i = 0; i < 4 && at < end; ++i, at += 64) __builtin_prefetch(at);
  }
};

// All tokens on a block of kMultiTokenRows rows, from row v of the state on. A vector of the state is updated by one token and read
// by the next one before it is stored. The bits are those of step_rows(). !keep: the state after the last token is not wanted.
HWY_INLINE void step_block(StepTokens& m, int64_t count, int64_t k_stride, int64_t v, bool keep, Prefetcher prefetcher) {
  const F32 d;
  constexpr int kRows = kMultiTokenRows;
  const F32Rows block{m.block, k_stride};
  VF reads[2 * kRows], e[kRows];  // reads: two rows times k, the same rows times q, and so on
  const auto read = [&](int64_t r, VF s, VF k, VF q) HWY_ATTR {
    VF* by = reads + r / 2 * 4 + r % 2;
    by[0] = hn::MulAdd(s, k, by[0]);
    by[2] = hn::MulAdd(s, q, by[2]);
  };
  WEFT_UNROLL for (VF& sum : reads) sum = hn::Zero(d);
  const KeyRows first = key_rows(m, 0, k_stride);
  for (int64_t i = 0; i < k_stride; i += kLanes) {
    prefetcher.prefetch_some();
    const VF k = hn::LoadU(d, first.k_read + i), q = hn::LoadU(d, first.q_read + i);
    WEFT_UNROLL for (int64_t r = 0; r < kRows; ++r) read(r, block.load(r, i), k, q);
  }
  for (int64_t t = 0; t < count; ++t) {
    HWY_ALIGN float sums[2 * kRows];
    WEFT_UNROLL for (int r = 0; r < kRows; r += 2) sum_lanes4(reads + 2 * r, sums + 2 * r);
    WEFT_UNROLL for (int r = 0; r < kRows; ++r) {
      const float* by = sums + r / 2 * 4 + r % 2;
      e[r] = write_row(m, t, t * kPaddedHead + v + r, by[0], by[2]);
    }
    const KeyRows keys = key_rows(m, t, k_stride);
    if (t + 1 < count) {
      const KeyRows next = key_rows(m, t + 1, k_stride);
      WEFT_UNROLL for (VF& sum : reads) sum = hn::Zero(d);
      for (int64_t i = 0; i < k_stride; i += kLanes) {
        prefetcher.prefetch_some();
        const VF decay = hn::LoadU(d, keys.decay + i), written = hn::LoadU(d, keys.k + i);
        const VF k = hn::LoadU(d, next.k_read + i), q = hn::LoadU(d, next.q_read + i);
        WEFT_UNROLL for (int64_t r = 0; r < kRows; ++r) {
          const VF s = updated(block.load(r, i), decay, e[r], written);
          block.store(r, i, s);
          read(r, s, k, q);
        }
      }
    } else if (keep) {
      for (int64_t i = 0; i < k_stride; i += kLanes) {
        const VF decay = hn::LoadU(d, keys.decay + i), written = hn::LoadU(d, keys.k + i);
        WEFT_UNROLL for (int64_t r = 0; r < kRows; ++r) block.store(r, i, updated(block.load(r, i), decay, e[r], written));
      }
    }
  }
}

// A [V, K] state whose rows are not whole vectors, or several tokens: kRows rows at a time are copied to f32, updated and stored.
template <int kVectors, int kRows>
HWY_NOINLINE void step_vk_by_blocks(StepTokens& m, const RecurrentStep& step, int64_t count, int64_t k_stride, int64_t in_base,
                                    int64_t out_base) {
  const int64_t K = step.heads.K, V = step.heads.V, size = dtype_bytes(step.in.dtype);
  const F32Rows block{m.block, k_stride};
  for (int64_t v = 0; v < V; v += kRows) {
    const int64_t rows = HWY_MIN(kRows, V - v);
    for (int64_t r = 0; r < kRows; ++r) {
      float* row = m.block + r * k_stride;
      const int64_t known = r < rows && in_base >= 0 ? K : 0;
      if (known > 0) unpack_row(step.in.dtype, step.in.data, in_base + (v + r) * K, K, row);
      fill_row(row + known, k_stride - known, 0);
    }
    if constexpr (kRows == kMultiTokenRows) {
      Prefetcher prefetcher;
      if (in_base >= 0 && v + rows < V) {
        prefetcher.at = static_cast<const char*>(step.in.data) + (in_base + (v + rows) * K) * size;
        prefetcher.end = prefetcher.at + HWY_MIN(kRows, V - v - rows) * K * size;
      }
      step_block(m, count, k_stride, v, out_base >= 0, prefetcher);
    } else {
      for (int64_t t = 0; t < count; ++t) step_rows<kVectors>(m, t, k_stride, v, block, block, rows, step.replay);
    }
    for (int64_t r = 0; r < rows && out_base >= 0; ++r)
      pack_row(m.block + r * k_stride, K, step.out.dtype, step.out.data, out_base + (v + r) * K);
  }
}

// A [V, K] state.
template <int kVectors>
HWY_NOINLINE void step_vk_state(StepTokens& m, const RecurrentStep& step, int64_t count, int64_t k_stride, int64_t in_base,
                                int64_t out_base) {
  const int64_t K = step.heads.K, V = step.heads.V;
  if (count == 1 && K % kLanes == 0 && in_base >= 0 && out_base >= 0 && step.in.dtype == step.out.dtype) {
    const auto in_place = [&](auto* in, auto* out, auto rows_of) HWY_ATTR {
      step_vk_in_place<kVectors>(m, k_stride, V, rows_of(in + in_base), rows_of(out + out_base), step.replay);
    };
    auto *in = static_cast<uint16_t*>(step.in.data), *out = static_cast<uint16_t*>(step.out.data);
    if (step.in.dtype == DType::f32)
      in_place(static_cast<float*>(step.in.data), static_cast<float*>(step.out.data), [K](float* p) { return F32Rows{p, K}; });
    else if (step.in.dtype == DType::f16)
      in_place(in, out, [K](uint16_t* p) { return F16Rows{p, K}; });
    else
      in_place(in, out, [K](uint16_t* p) { return Bf16Rows{p, K}; });
    return;
  }
  if (count > 1 && !step.replay) return step_vk_by_blocks<0, kMultiTokenRows>(m, step, count, k_stride, in_base, out_base);
  step_vk_by_blocks<kVectors, kStepRows>(m, step, count, k_stride, in_base, out_base);
}

// Vectors of a row such that two rows leave enough registers for everything else.
constexpr int kHeldVectors = HWY_MAX_BYTES >= 64 || HWY_ARCH_ARM_A64 ? 8 : 4;

// All tokens on the state of one head.
HWY_INLINE void step_state(StepTokens& m, const RecurrentStep& step, int64_t count, int64_t k_stride, int64_t in_base,
                           int64_t out_base) {
  if (step.layout == StateLayout::kv) return step_kv_state(m, step, count, k_stride, in_base, out_base);
  if (!step.replay && k_stride == kHeldVectors * kLanes)
    return step_vk_state<kHeldVectors>(m, step, count, k_stride, in_base, out_base);
  if (!step.replay && k_stride == kHeldVectors / 2 * kLanes)
    return step_vk_state<kHeldVectors / 2>(m, step, count, k_stride, in_base, out_base);
  step_vk_state<0>(m, step, count, k_stride, in_base, out_base);
}

size_t recurrent_step_bytes() { return sizeof(StepTokens); }

// A recurrent step: tokens [begin, begin + count) of a sequence for value head hv.
void recurrent_step(const RecurrentStep& step, int64_t begin, int64_t count, int64_t hv, int64_t in_slot, int64_t out_slot,
                    void* memory) {
  const F32 d;
  StepTokens& m = *static_cast<StepTokens*>(memory);
  const int64_t K = step.heads.K, V = step.heads.V, k_stride = round_up(K, kLanes), hk = step.heads.key_head(hv);
  const GateView& gates = step.gates;
  if (!gates.per_channel) log_decays(gates, begin, count, hv, m.g);
  if (!step.replay) strengths(gates, begin, count, hv, m.beta);
  for (int64_t t = 0; t < count; ++t) {
    const auto [k, k_read, q_read, decay] = key_rows(m, t, k_stride);
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
    // The first value head of a group records the key that the group shares.
    if (step.record_k.data && step.heads.value_head(hk, 0) == hv)
      pack_row(k, K, DType::f32, step.record_k.data, step.record_k.at(begin + t, hk));
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
