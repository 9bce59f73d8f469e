// Gates, short convolution and norms: one vector pass over the activations each.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_DELTA_PARTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_DELTA_PARTS_INL_H_
#undef WEFT_CPU_DELTA_PARTS_INL_H_
#else
#define WEFT_CPU_DELTA_PARTS_INL_H_
#endif

#include "cpu/delta_parts.h"
#include "cpu/gates-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Numbers converted at a time: small enough to stay in the first-level cache, large enough to hide the dtype switch.
constexpr int64_t kSpan = 512;

// ---- delta_gates: rows [first, last) of tokens

void gates_rows(const GatesRows& p, int64_t first, int64_t last) {
  const F32 d;
  HWY_ALIGN float x[kSpan], bias[kSpan], a_log[kSpan];
  for (int64_t t = first; t < last; ++t) {
    if (p.per_channel) {
      for (int64_t h = 0; h < p.Hv; ++h)
        for (int64_t c = 0; c < p.K; c += kSpan) {
          const int64_t count = HWY_MIN(kSpan, p.K - c);
          unpack_row(p.a.dtype, p.a.data, p.a.at(t, h) + c, count, x);
          unpack_row(DType::f32, p.dt_bias, h * p.dt_bias_stride + c, count, bias);
          fill_row(x + count, round_up(count, kLanes) - count, 0);
          fill_row(bias + count, round_up(count, kLanes) - count, 0);
          const VF head = hn::Set(d, p.a_log[h * p.a_log_stride]);
          for (int64_t i = 0; i < count; i += kLanes)
            hn::StoreU(log_decay(hn::LoadU(d, x + i), hn::LoadU(d, bias + i), head), d, x + i);
          pack_row(x, count, DType::f32, p.g.data, p.g.at(t, h) + c);
        }
    } else {
      for (int64_t h = 0; h < p.Hv; h += kSpan) {
        const int64_t count = HWY_MIN(kSpan, p.Hv - h), padded = round_up(count, kLanes);
        unpack_row(p.a.dtype, p.a.data, p.a.at(t, 0) + h, count, x);
        if (t == first || p.Hv > kSpan) {
          for (int64_t i = 0; i < count; ++i) {
            bias[i] = p.dt_bias[(h + i) * p.dt_bias_stride];
            a_log[i] = p.a_log[(h + i) * p.a_log_stride];
          }
          fill_row(bias + count, padded - count, 0);
          fill_row(a_log + count, padded - count, 0);
        }
        fill_row(x + count, padded - count, 0);
        for (int64_t i = 0; i < count; i += kLanes)
          hn::StoreU(log_decay(hn::LoadU(d, x + i), hn::LoadU(d, bias + i), hn::LoadU(d, a_log + i)), d, x + i);
        pack_row(x, count, DType::f32, p.g.data, p.g.at(t, 0) + h);
      }
    }
    for (int64_t h = 0; p.b.data && h < p.Hv; h += kSpan) {
      const int64_t count = HWY_MIN(kSpan, p.Hv - h);
      unpack_row(p.b.dtype, p.b.data, p.b.at(t, 0) + h, count, x);
      fill_row(x + count, round_up(count, kLanes) - count, 0);
      for (int64_t i = 0; i < count; i += kLanes)
        hn::StoreU(hn::Mul(hn::Set(d, p.beta_factor), sigmoid(hn::LoadU(d, x + i))), d, x + i);
      pack_row(x, count, DType::f32, p.beta.data, p.beta.at(t, 0) + h);
    }
  }
}

// ---- short_conv: channels [first, last) of one sequence. The last W inputs of a span of channels roll through a window.

constexpr int64_t kConvSpan = 4 * kLanes;

void conv_channels(const ConvRows& p, TokenRange tokens, int64_t in_slot, int64_t out_slot, int64_t offset, int64_t first,
                   int64_t last, float* staged) {
  const F32 d;
  HWY_ALIGN float window[8][kConvSpan], weight[8][kConvSpan], bias[kConvSpan], y[kConvSpan];
  const int64_t W = p.W, L = p.L;
  for (int64_t c = first; c < last; c += kConvSpan) {
    const int64_t count = HWY_MIN(kConvSpan, last - c);
    for (int64_t m = 0; m < W; ++m)
      for (int64_t i = 0; i < kConvSpan; ++i)
        weight[m][i] = i < count ? load_one(p.weight_dtype, p.weight, (c + i) * p.weight_stride + m) : 0;
    fill_row(bias, kConvSpan, 0);
    if (p.bias) unpack_row(p.bias_dtype, p.bias, c, count, bias);
    // Row r of [state rows up to the end of the history | x].
    const int64_t history_end = offset + W - 1;
    const auto read = [&](int64_t r, float* to) {
      if (r >= history_end)
        unpack_row(p.x.dtype, p.x.data, (tokens.begin + r - history_end) * p.x.token + c, count, to);
      else if (r >= 0 && in_slot >= 0)
        unpack_row(p.in_dtype, p.state_in, in_slot * p.in_slot_stride + r * p.in_row_stride + c, count, to);
      else
        fill_row(to, count, 0);
    };
    for (int64_t m = 0; m < W - 1; ++m) {
      fill_row(window[m], kConvSpan, 0);
      read(offset + m, window[m]);
    }
    fill_row(window[W - 1], kConvSpan, 0);
    if (out_slot >= 0) {  // the new state is read whole before anything of it, or of x in place, is overwritten
      for (int64_t l = 0; l < L; ++l) read(history_end + tokens.length() - L + l, staged + l * kConvSpan);
      for (int64_t l = 0; l < L; ++l)
        pack_row(staged + l * kConvSpan, count, p.out_dtype, p.state_out, out_slot * p.out_slot_stride + l * p.out_row_stride + c);
    }
    int64_t newest = W - 1;  // window slot of the current token; the next slot is the oldest
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      unpack_row(p.x.dtype, p.x.data, t * p.x.token + c, count, window[newest]);
      for (int64_t i = 0; i < count; i += kLanes) {
        VF sum = hn::Load(d, bias + i);
        int64_t slot = newest + 1 == W ? 0 : newest + 1;
        for (int64_t m = 0; m < W; ++m) {
          sum = hn::MulAdd(hn::Load(d, weight[m] + i), hn::Load(d, window[slot] + i), sum);
          slot = slot + 1 == W ? 0 : slot + 1;
        }
        hn::Store(p.silu ? silu(sum) : sum, d, y + i);
      }
      pack_row(y, count, p.y.dtype, p.y.data, t * p.y.token + c);
      newest = newest + 1 == W ? 0 : newest + 1;
    }
  }
}

int64_t conv_span() { return kConvSpan; }

// ---- norms: one row

HWY_INLINE float sum_of_squares(DType dtype, const void* data, int64_t base, int64_t D, float* span) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t c = 0; c < D; c += kSpan) {
    const int64_t count = HWY_MIN(kSpan, D - c);
    unpack_row(dtype, data, base + c, count, span);
    fill_row(span + count, round_up(count, kLanes) - count, 0);
    for (int64_t i = 0; i < count; i += kLanes) {
      const VF x = hn::Load(d, span + i);
      sum = hn::MulAdd(x, x, sum);
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

void l2_norm_row(const NormRow& p) {
  const F32 d;
  HWY_ALIGN float x[kSpan];
  const float sum = sum_of_squares(p.x_dtype, p.x, p.x_base, p.D, x) + p.eps;
  const VF factor = hn::Set(d, sum == 0 ? 0.0f : 1.0f / std::sqrt(sum));
  for (int64_t c = 0; c < p.D; c += kSpan) {
    const int64_t count = HWY_MIN(kSpan, p.D - c);
    if (p.D > kSpan) unpack_row(p.x_dtype, p.x, p.x_base + c, count, x);
    for (int64_t i = 0; i < count; i += kLanes) hn::Store(hn::Mul(factor, hn::Load(d, x + i)), d, x + i);
    pack_row(x, count, p.y_dtype, p.y, p.y_base + c);
  }
}

void gated_rms_norm_row(const NormRow& p) {
  const F32 d;
  HWY_ALIGN float x[kSpan], z[kSpan], w[kSpan];
  const float mean = sum_of_squares(p.x_dtype, p.x, p.x_base, p.D, x) / static_cast<float>(p.D) + p.eps;
  const VF factor = hn::Set(d, mean == 0 ? 0.0f : 1.0f / std::sqrt(mean));
  for (int64_t c = 0; c < p.D; c += kSpan) {
    const int64_t count = HWY_MIN(kSpan, p.D - c), tail = round_up(count, kLanes) - count;
    if (p.D > kSpan) unpack_row(p.x_dtype, p.x, p.x_base + c, count, x);
    unpack_row(p.z_dtype, p.z, p.z_base + c, count, z);
    unpack_row(p.w_dtype, p.w, c, count, w);
    fill_row(z + count, tail, 0);
    fill_row(w + count, tail, 0);
    for (int64_t i = 0; i < count; i += kLanes) {
      const VF gate = hn::Load(d, z + i);
      const VF scaled = hn::Mul(hn::Load(d, w + i), hn::Mul(factor, hn::Load(d, x + i)));
      hn::Store(hn::Mul(scaled, p.silu ? silu(gate) : sigmoid(gate)), d, x + i);
    }
    pack_row(x, count, p.y_dtype, p.y, p.y_base + c);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
