// Preprocessing kernels: gates, short convolution and norms, each one vectorised pass over the activations.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_DELTA_PREPROCESS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_DELTA_PREPROCESS_INL_H_
#undef WEFT_CPU_DELTA_PREPROCESS_INL_H_
#else
#define WEFT_CPU_DELTA_PREPROCESS_INL_H_
#endif

#include <cstring>
#include <type_traits>

#include "core/limits.h"
#include "cpu/delta/delta_preprocess.h"
#include "cpu/delta/gates-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Numbers converted at a time: few enough for the first-level cache, many enough to amortise the switch over dtypes.
constexpr int64_t kSpan = 512;

// ---- delta_gates: rows [first, last) of tokens

void gates_rows(const GatesParams& p, int64_t first, int64_t last) {
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

// ---- short_conv: channels [first, last) of one sequence, a block of channels at a time
//
// Weights and the last inputs of a block stay in the first-level cache as f32 while its tokens are processed, four at a time, row
// by row. A loop down a column would access addresses a power of two apart, which compete for the same few cache lines.

constexpr int64_t kConvSpan = 4 * kLanes;  // threads split channels at multiples of this
constexpr int64_t kConvBlock = 512;
constexpr int kConvTokens = 4;
constexpr int64_t kMaxTaps = kMaxConvWidth;

// For every vector of channels its weights (oldest tap first), its last W - 1 inputs (oldest first) and its bias, contiguous.
// Separate rows for each of these would compete with the token rows for the same cache lines.
struct ConvBlock {
  HWY_ALIGN float vectors[2 * kMaxTaps * kConvBlock];
  HWY_ALIGN float tile[kConvTokens][kConvBlock];  // f32 copies of token rows that conv_rows() cannot use in place
};

struct ConvVector {
  float *weight, *history, *bias;
};
HWY_INLINE ConvVector conv_vector(ConvBlock& b, int64_t W, int64_t c) {
  float* first = b.vectors + 2 * W * c;
  return {first, first + W * kLanes, first + (2 * W - 1) * kLanes};
}

// Calls work(m) for every tap m: kTaps of them, unrolled, or `taps` if kTaps is 0.
template <int kTaps, class Work>
HWY_INLINE void each_tap(int64_t taps, Work work) {
  if constexpr (kTaps > 0) {
    WEFT_UNROLL for (int64_t m = 0; m < kTaps; ++m) work(m);
  } else {
    for (int64_t m = 0; m < taps; ++m) work(m);
  }
}

// kVectors vectors of channels, from channel c of the block on, for kTokens tokens. kTaps 0: any number of taps. All inputs are
// read before an output is written, because outputs may overwrite inputs.
template <int kTaps, int kTokens, int kVectors, class Rows>
HWY_INLINE void conv_vectors(ConvBlock& b, const ConvParams& p, int64_t c, const Rows& x, const Rows& y, int64_t at) {
  const F32 d;
  const int64_t W = kTaps > 0 ? kTaps : p.W;
  constexpr int kBefore = kTaps > 0 ? kTaps - 1 : 0, kSums = kVectors * kTokens, kSilus = HWY_MIN(kSums, kChains);
  VF sums[kSums];
  WEFT_UNROLL for (int v = 0; v < kVectors; ++v) {
    const auto [weights, history, bias] = conv_vector(b, W, c + v * kLanes);
    VF in[(kTaps > 0 ? kTaps : kMaxTaps) - 1 + kTokens], *sum = sums + v * kTokens;
    each_tap<kBefore>(W - 1, [&, from = history](int64_t m) HWY_ATTR { in[m] = hn::Load(d, from + m * kLanes); });
    WEFT_UNROLL for (int64_t r = 0; r < kTokens; ++r) in[W - 1 + r] = x.load(r, at + v * kLanes);
    each_tap<kBefore>(W - 1, [&, to = history](int64_t m) HWY_ATTR { hn::Store(in[kTokens + m], d, to + m * kLanes); });
    WEFT_UNROLL for (int64_t r = 0; r < kTokens; ++r) sum[r] = hn::Load(d, bias);
    each_tap<kTaps>(W, [&, from = weights](int64_t m) HWY_ATTR {
      const VF weight = hn::Load(d, from + m * kLanes);
      WEFT_UNROLL for (int64_t r = 0; r < kTokens; ++r) sum[r] = hn::MulAdd(weight, in[r + m], sum[r]);
    });
  }
  if (p.silu) WEFT_UNROLL for (int i = 0; i < kSums; i += kSilus) silus<kSilus>(sums + i);
  WEFT_UNROLL for (int v = 0; v < kVectors; ++v) WEFT_UNROLL for (int64_t r = 0; r < kTokens; ++r)
      y.store(r, at + v * kLanes, sums[v * kTokens + r]);
}

// `count` channels (whole vectors) from channel c of the block on, for kTokens tokens. Rows x and y begin at channel c.
template <int kTaps, int kTokens, class Rows, class Prefetch>
HWY_INLINE void conv_rows(ConvBlock& b, const ConvParams& p, int64_t c, int64_t count, const Rows& x, const Rows& y,
                          Prefetch prefetch) {
  constexpr int kVectors = kTokens == 1 ? kChains : 1;
  int64_t i = 0;
  for (; i + kVectors * kLanes <= count; i += kVectors * kLanes) {
    prefetch(i);
    conv_vectors<kTaps, kTokens, kVectors>(b, p, c + i, x, y, i);
  }
  for (; i < count; i += kLanes) conv_vectors<kTaps, kTokens, 1>(b, p, c + i, x, y, i);
}

// Numbers that lie `stride` apart, as f32.
HWY_INLINE void unpack_strided(DType dtype, const void* from, int64_t first, int64_t stride, int64_t count, float* to) {
  if (stride == 1) return unpack_row(dtype, from, first, count, to);
  for (int64_t i = 0; i < count; ++i) to[i] = load_one(dtype, from, first + i * stride);
}

// kTokens rows of x from token t and channel c on, as f32 rows of the tile.
template <int kTokens>
HWY_INLINE void fill_tile(ConvBlock& b, const ConvParams& p, int64_t t, int64_t c, int64_t count) {
  const int64_t padded = round_up(count, kLanes);
  if (p.x.dtype == DType::f32 && p.x.head != 1) {  // a channel at a time: where tokens lie side by side, that reads a line once
    const float* from = static_cast<const float*>(p.x.data) + p.x.at(t, c);
    for (int64_t i = 0; i < count; ++i, from += p.x.head)
      WEFT_UNROLL for (int64_t r = 0; r < kTokens; ++r) b.tile[r][i] = from[r * p.x.token];
  } else {
    for (int64_t r = 0; r < kTokens; ++r) unpack_strided(p.x.dtype, p.x.data, p.x.at(t + r, c), p.x.head, count, b.tile[r]);
  }
  for (int64_t r = 0; r < kTokens; ++r) fill_row(b.tile[r] + count, padded - count, 0);
}

// The same through f32 copies of the rows: for channels that do not fill a vector or do not lie side by side, and where outputs and
// inputs differ in dtype.
template <int kTaps, int kTokens>
HWY_NOINLINE void conv_tile(ConvBlock& b, const ConvParams& p, int64_t t, int64_t channel, int64_t c, int64_t count) {
  const F32Rows tile{&b.tile[0][0], kConvBlock};
  const int64_t padded = round_up(count, kLanes);
  fill_tile<kTokens>(b, p, t, channel + c, count);
  conv_rows<kTaps, kTokens>(b, p, c, padded, tile, tile, [](int64_t) {});
  for (int64_t r = 0; r < kTokens; ++r) pack_row(b.tile[r], count, p.y.dtype, p.y.data, (t + r) * p.y.token + channel + c);
}

template <int kTaps, class Rows>
HWY_INLINE void conv_block(ConvBlock& b, const ConvParams& p, TokenRange tokens, int64_t channel, int64_t count) {
  using Number = std::remove_pointer_t<decltype(Rows::data)>;
  const int64_t whole = p.x.dtype == p.y.dtype && p.x.head == 1 ? count / kLanes * kLanes : 0;
  const auto some = [&]<int kTokens>(int64_t t) HWY_ATTR {
    const Rows x{static_cast<Number*>(p.x.data) + t * p.x.token + channel, p.x.token};
    const Rows y{static_cast<Number*>(p.y.data) + t * p.y.token + channel, p.y.token};
    // Prefetches the rows of the next tokens: hardware prefetchers do not follow strides from row to row.
    const bool more = t + 2 * kTokens <= tokens.end;
    if (whole > 0)
      conv_rows<kTaps, kTokens>(b, p, 0, whole, x, y, [&](int64_t c) HWY_ATTR {
        if (!more) return;
        WEFT_UNROLL for (int64_t r = 0; r < kTokens; ++r) {
          __builtin_prefetch(x.from(kTokens + r).data + c, 0, 2);
          __builtin_prefetch(y.from(kTokens + r).data + c, 1, 2);
        }
      });
    if (whole < count) conv_tile<kTaps, kTokens>(b, p, t, channel, whole, count - whole);
  };
  int64_t t = tokens.begin;
  for (; t + kConvTokens <= tokens.end; t += kConvTokens) some.template operator()<kConvTokens>(t);
  for (; t < tokens.end; ++t) some.template operator()<1>(t);
}

template <int kTaps>
HWY_NOINLINE void conv_block(ConvBlock& b, const ConvParams& p, TokenRange tokens, int64_t channel, int64_t count) {
  if (p.x.dtype == DType::f32) return conv_block<kTaps, F32Rows>(b, p, tokens, channel, count);
  if (p.x.dtype == DType::f16) return conv_block<kTaps, F16Rows>(b, p, tokens, channel, count);
  conv_block<kTaps, Bf16Rows>(b, p, tokens, channel, count);
}

// Loads `count` numbers, at most kLanes and `stride` apart, as a vector padded with zeros.
HWY_INLINE VF load_some(DType dtype, const void* data, int64_t at, int64_t count, int64_t stride = 1) {
  const F32 d;
  HWY_ALIGN float lanes[kLanes];
  if (count == kLanes && stride == 1) {
    if (dtype == DType::f32) return hn::LoadU(d, static_cast<const float*>(data) + at);
    return dtype == DType::f16 ? load_f16(static_cast<const uint16_t*>(data) + at)
                               : load_bf16(static_cast<const uint16_t*>(data) + at);
  }
  unpack_strided(dtype, data, at, stride, count, lanes);
  fill_row(lanes + count, kLanes - count, 0);
  return hn::Load(d, lanes);
}

// Fills the block: weights ([channel][tap] in memory), the history, whose first row begins at `state` (< 0: zeros), and biases.
HWY_INLINE void load_block(ConvBlock& b, const ConvParams& p, int64_t state, int64_t channel, int64_t count) {
  const F32 d;
  HWY_ALIGN float rows[kMaxTaps * kLanes];
  for (int64_t c = 0; c < count; c += kLanes) {
    const auto [weight, history, bias] = conv_vector(b, p.W, c);
    const int64_t real = HWY_MIN(kLanes, count - c), at = channel + c;
    if (p.weight_stride == p.W) {
      unpack_row(p.weight_dtype, p.weight, at * p.W, real * p.W, rows);
    } else {
      for (int64_t i = 0; i < real; ++i) unpack_row(p.weight_dtype, p.weight, (at + i) * p.weight_stride, p.W, rows + i * p.W);
    }
    if (real < kLanes) fill_row(rows + real * p.W, (kLanes - real) * p.W, 0);
    if (p.W == 4) {
      VF tap[4];
      hn::LoadInterleaved4(d, rows, tap[0], tap[1], tap[2], tap[3]);
      WEFT_UNROLL for (int m = 0; m < 4; ++m) hn::Store(tap[m], d, weight + m * kLanes);
    } else {
      for (int64_t m = 0; m < p.W; ++m)
        for (int64_t i = 0; i < kLanes; ++i) weight[m * kLanes + i] = rows[i * p.W + m];
    }
    for (int64_t m = 0; m < p.W - 1; ++m)
      hn::Store(state >= 0 ? load_some(p.in_dtype, p.state_in, state + m * p.in_row_stride + at * p.in_channel_stride, real,
                                       p.in_channel_stride)
                           : hn::Zero(d),
                d, history + m * kLanes);
    hn::Store(p.bias ? load_some(p.bias_dtype, p.bias, at, real) : hn::Zero(d), d, bias);
  }
}

// Copies `count` numbers, `stride` apart, to contiguous ones, converting between dtypes.
HWY_INLINE void copy_numbers(DType from_dtype, const void* from, int64_t from_at, int64_t stride, DType to_dtype, void* to,
                             int64_t to_at, int64_t count) {
  if (from_dtype == to_dtype &&
      stride == 1) {  // not memcpy: for a size unknown at compile time it may become `rep movs`, which is slow to start
    const hn::ScalableTag<uint8_t> d8;
    constexpr int64_t kBytes = kLanes * static_cast<int64_t>(sizeof(float));
    const int64_t size = dtype_bytes(to_dtype), bytes = count * size;
    const uint8_t* source = static_cast<const uint8_t*>(from) + from_at * size;
    uint8_t* target = static_cast<uint8_t*>(to) + to_at * size;
    int64_t i = 0;
    for (; !WEFT_EMULATED && i + kBytes <= bytes; i += kBytes) hn::StoreU(hn::LoadU(d8, source + i), d8, target + i);
    for (; i < bytes; ++i) target[i] = source[i];
    return;
  }
  HWY_ALIGN float numbers[kSpan];
  for (int64_t c = 0; c < count; c += kSpan) {
    unpack_strided(from_dtype, from, from_at + c * stride, stride, HWY_MIN(kSpan, count - c), numbers);
    pack_row(numbers, HWY_MIN(kSpan, count - c), to_dtype, to, to_at + c);
  }
}

// Prefetches what a block of channels reads first. With few tokens, waiting for these loads would dominate the time.
HWY_INLINE void prefetch_block(const ConvParams& p, TokenRange tokens, int64_t state, int64_t channel, int64_t count) {
  const auto prefetch = [](DType dtype, const void* data, int64_t at, int64_t numbers) {
    const int64_t size = dtype_bytes(dtype);
    const char* first = static_cast<const char*>(data) + at * size;
    for (int64_t i = 0; i < numbers * size; i += 64) __builtin_prefetch(first + i);
  };
  if (p.weight_stride == p.W) prefetch(p.weight_dtype, p.weight, channel * p.W, count * p.W);
  if (tokens.length() > 0) {
    if (p.x.head == 1) prefetch(p.x.dtype, p.x.data, p.x.at(tokens.begin, channel), count);
    prefetch(p.y.dtype, p.y.data, tokens.begin * p.y.token + channel, count);
  }
  for (int64_t m = 0; m < p.W - 1 && state >= 0 && p.in_channel_stride == 1; ++m)
    prefetch(p.in_dtype, p.state_in, state + m * p.in_row_stride + channel, count);
}

void conv_channels(const ConvParams& p, TokenRange tokens, int64_t in_slot, int64_t out_slot, int64_t offset, int64_t first,
                   int64_t last) {
  ConvBlock b;
  const int64_t W = p.W, L = p.L, history_end = offset + W - 1;
  const auto state_at = [&](int64_t row) { return in_slot * p.in_slot_stride + row * p.in_row_stride; };
  const int64_t history = in_slot >= 0 ? state_at(offset) : -1;
  for (int64_t c = first; c < last; c += kConvBlock) {
    const int64_t count = HWY_MIN(kConvBlock, last - c);
    if (c + kConvBlock < last) prefetch_block(p, tokens, history, c + kConvBlock, HWY_MIN(kConvBlock, last - c - kConvBlock));
    load_block(b, p, history, c, count);
    // The new state is written before y, which may overwrite x. Row l of it is row l + shift of [state up to the end of the history
    // | x]. The order of rows makes sure that an in-place update reads each row before overwriting it.
    const int64_t shift = history_end + tokens.length() - L;
    for (int64_t i = 0; i < L && out_slot >= 0; ++i) {
      const int64_t l = shift >= 0 ? i : L - 1 - i, row = l + shift;
      const int64_t to = out_slot * p.out_slot_stride + l * p.out_row_stride + c;
      if (row >= history_end)
        copy_numbers(p.x.dtype, p.x.data, p.x.at(tokens.begin + row - history_end, c), p.x.head, p.out_dtype, p.state_out, to,
                     count);
      else if (row < 0 || in_slot < 0)
        std::memset(static_cast<char*>(p.state_out) + to * dtype_bytes(p.out_dtype), 0,
                    static_cast<size_t>(count * dtype_bytes(p.out_dtype)));
      else if (p.state_in != p.state_out || state_at(row) + c != to)
        copy_numbers(p.in_dtype, p.state_in, state_at(row) + c * p.in_channel_stride, p.in_channel_stride, p.out_dtype, p.state_out,
                     to, count);
    }
    if (W == 4)
      conv_block<4>(b, p, tokens, c, count);
    else
      conv_block<0>(b, p, tokens, c, count);
  }
}

int64_t conv_span() { return kConvSpan; }

// ---- norms: four rows at a time, so that the sum and root of one row overlap with the products of the others

constexpr int64_t kNormRows = 4;

// Computes factor(sum of squares) of every row, then calls finish(numbers, factor, row, first, count), which turns numbers [first,
// first + count) of the row into outputs in place. The numbers are padded with zeros.
template <class Factor, class Finish>
HWY_INLINE void norm_rows(const NormParams& p, int64_t rows, Factor factor, Finish finish) {
  const F32 d;
  HWY_ALIGN float x[kNormRows][kSpan];
  const auto load = [&](int64_t row, int64_t c, float* to) HWY_ATTR {
    const int64_t count = HWY_MIN(kSpan, p.D - c);
    unpack_row(p.x_dtype, p.x, p.x_base + row * p.x_stride + c, count, to);
    fill_row(to + count, round_up(count, kLanes) - count, 0);
    return count;
  };
  for (int64_t first = 0; first < rows; first += kNormRows) {
    const int64_t some = HWY_MIN(kNormRows, rows - first);
    VF squares[kNormRows];
    for (int64_t r = 0; r < kNormRows; ++r) {
      squares[r] = hn::Zero(d);
      for (int64_t c = 0; r < some && c < p.D; c += kSpan) {
        const int64_t count = load(first + r, c, x[r]);
        for (int64_t i = 0; i < count; i += kLanes) {
          const VF v = hn::Load(d, x[r] + i);
          squares[r] = hn::MulAdd(v, v, squares[r]);
        }
      }
    }
    HWY_ALIGN float sums[kNormRows];
    sum_lanes4(squares, sums);
    for (int64_t r = 0; r < some; ++r) {
      const VF by = hn::Set(d, factor(sums[r]));
      for (int64_t c = 0; c < p.D; c += kSpan) {
        const int64_t count = p.D > kSpan ? load(first + r, c, x[r]) : p.D;
        finish(x[r], by, first + r, c, count);
        pack_row(x[r], count, p.y_dtype, p.y, p.y_base + (first + r) * p.y_stride + c);
      }
    }
  }
}

HWY_INLINE float root_factor(float square) { return square == 0 ? 0.0f : 1.0f / std::sqrt(square); }

void l2_norm_rows(const NormParams& p, int64_t rows) {
  const F32 d;
  norm_rows(
      p, rows, [&](float sum) { return root_factor(sum + p.eps); },
      [&](float* x, VF factor, int64_t, int64_t, int64_t count) HWY_ATTR {
        for (int64_t i = 0; i < count; i += kLanes) hn::Store(hn::Mul(factor, hn::Load(d, x + i)), d, x + i);
      });
}

void gated_rms_norm_rows(const NormParams& p, int64_t rows) {
  const F32 d;
  HWY_ALIGN float z[kSpan], w[kSpan];
  const auto load = [&](DType dtype, const void* from, int64_t at, int64_t count, float* to) HWY_ATTR {
    unpack_row(dtype, from, at, count, to);
    fill_row(to + count, round_up(count, kLanes) - count, 0);
  };
  if (p.D <= kSpan) load(p.w_dtype, p.w, 0, p.D, w);
  norm_rows(
      p, rows, [&](float sum) { return root_factor(sum / static_cast<float>(p.D) + p.eps); },
      [&](float* x, VF factor, int64_t row, int64_t c, int64_t count) HWY_ATTR {
        if (p.D > kSpan) load(p.w_dtype, p.w, c, count, w);
        load(p.z_dtype, p.z, p.z_base + row * p.z_stride + c, count, z);
        const auto gated = [&]<int kCount>(int64_t at) HWY_ATTR {
          VF gate[kCount];
          WEFT_UNROLL for (int i = 0; i < kCount; ++i) gate[i] = hn::Load(d, z + at + i * kLanes);
          p.silu ? silus<kCount>(gate) : sigmoids<kCount>(gate);
          WEFT_UNROLL for (int i = 0; i < kCount; ++i) {
            const VF scaled = hn::Mul(hn::Load(d, w + at + i * kLanes), hn::Mul(factor, hn::Load(d, x + at + i * kLanes)));
            hn::Store(hn::Mul(scaled, gate[i]), d, x + at + i * kLanes);
          }
        };
        int64_t i = 0;
        for (; i + kChains * kLanes <= count; i += kChains * kLanes) gated.template operator()<kChains>(i);
        for (; i < count; i += kLanes) gated.template operator()<1>(i);
      });
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
