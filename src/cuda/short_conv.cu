// short_conv on cuda: a thread slides a window of registers over a run of tokens of a few neighbouring channels.
#include "cuda/elements.cuh"
#include "cuda/gate_math.cuh"
#include "cuda/launch.cuh"
#include "cuda/table.h"
#include "shared/conv_slots.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128, kMaxWidth = 8;
constexpr int kBatch = 4;  // rows of a thread on their way

// How the tokens of a call are cut: runs of `run` tokens, `runs` for the longest sequence.
struct Cut {
  int64_t run = 0, runs = 0, channel_blocks = 0;
  int64_t each = 0;  // tokens of every sequence, when uniform
};

// Elements of one dtype known at compile time, in packs; or (void) of any dtype, one by one.
template <class T, int N>
struct Channels {
  __device__ static void load(const Tensor& t, int64_t i, float (&out)[N]) {
    load_pack<T, N>(static_cast<const T*>(t.data) + i, out);
  }
  using Raw = Pack<T, N>;
  __device__ static Raw load_raw(const Tensor& t, int64_t i) {
    return *reinterpret_cast<const Raw*>(static_cast<const T*>(t.data) + i);
  }
  __device__ static void convert(const Raw& raw, float (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = to_float(raw.x[j]);
  }
  __device__ static void store(const Tensor& t, int64_t i, const float (&in)[N]) {
    store_pack<T, N>(static_cast<T*>(t.data) + i, in);
  }
};
template <>
struct Channels<void, 1> {
  __device__ static void load(const Tensor& t, int64_t i, float (&out)[1]) { out[0] = cuda::load(t, i); }
  using Raw = float;
  __device__ static Raw load_raw(const Tensor& t, int64_t i) { return cuda::load(t, i); }
  __device__ static void convert(Raw raw, float (&out)[1]) { out[0] = raw; }
  __device__ static void store(const Tensor& t, int64_t i, const float (&in)[1]) { cuda::store(t, i, in[0]); }
};

// Row `row` of [state rows before and including the history | x]; zeros before it and where the state is fresh.
template <class T, int N>
__device__ void extended_row(const ShortConvArgs& args, const ConvSlots& slots, TokenRange range, int64_t history, int64_t row,
                             int64_t c, float (&out)[N]) {
  if (row >= history) {
    Channels<T, N>::load(args.x, (range.begin + row - history) * args.x.strides[0] + c, out);
  } else if (row >= 0 && slots.in >= 0) {
    Channels<T, N>::load(args.state_in, slots.in * args.state_in.strides[0] + row * args.state_in.strides[1] + c, out);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = 0.0f;
  }
}

// Writes the state. Rows may move within one slot: towards the front in rising order, towards the back in falling order, so that none
// is overwritten before it was read.
template <class T, int N>
__device__ void write_state(const ShortConvArgs& args, const ConvSlots& slots, TokenRange range, int64_t history, int64_t c) {
  const int64_t L = args.state_out.size(1), shift = history + range.length() - L;
  for (int64_t i = 0; i < L; ++i) {
    const int64_t l = shift >= 0 ? i : L - 1 - i;
    float row[N];
    extended_row<T, N>(args, slots, range, history, l + shift, c, row);
    Channels<T, N>::store(args.state_out, slots.out * args.state_out.strides[0] + l * args.state_out.strides[1] + c, row);
  }
}

// The taps of N channels, oldest first, zeros before those that the filter has.
template <class T, int N, int MaxW>
__device__ void load_weights(const Tensor& weight, int64_t c, float (&out)[MaxW][N]) {
  const int W = static_cast<int>(weight.size(1));
  if constexpr (N > 1 && MaxW == 4) {
    // Four taps of a channel lie together: whole filters in one access.
    if (W == MaxW && weight.strides[0] == MaxW && reinterpret_cast<uintptr_t>(weight.data) % 16 == 0) {
      const auto load_all = [&](const auto* from) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float taps[MaxW];
          load_pack(from + (c + i) * MaxW, taps);
#pragma unroll
          for (int m = 0; m < MaxW; ++m) out[m][i] = taps[m];
        }
      };
      if (weight.dtype == DType::f32) return load_all(static_cast<const float*>(weight.data));
      if (weight.dtype == DType::bf16) return load_all(static_cast<const __nv_bfloat16*>(weight.data));
      return load_all(static_cast<const __half*>(weight.data));
    }
  }
#pragma unroll
  for (int m = 0; m < MaxW; ++m) {
    const int tap = m - (MaxW - W);
#pragma unroll
    for (int i = 0; i < N; ++i) out[m][i] = tap >= 0 ? load(weight, (c + i) * weight.strides[0] + tap) : 0.0f;
  }
}

template <class T, int N, int MaxW>
__global__ void __launch_bounds__(kThreads, N > 1 ? 8 : 1)
    short_conv_kernel(const __grid_constant__ ShortConvArgs args, const __grid_constant__ Cut cut) {
  const int64_t C = args.x.size(1);
  const int W = static_cast<int>(args.weight.size(1));
  const uint32_t block = blockIdx.x, channel_blocks = static_cast<uint32_t>(cut.channel_blocks),
                 runs = static_cast<uint32_t>(cut.runs);
  const int64_t c = (int64_t{block % channel_blocks} * kThreads + threadIdx.x) * N;
  const int64_t run = block / channel_blocks % runs, n = block / channel_blocks / runs;
  if (c >= C) return;
  const TokenRange range = tokens_of(args.sequences, n, args.x.size(0), cut.each);
  if (!range.legal) return;
  const int64_t first = range.begin + run * cut.run, last = min(first + cut.run, range.end);
  if (run > 0 && first >= range.end) return;
  const ConvSlots slots = conv_slots(args, n);
  float out[N];
  if (slots.inert) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = 0.0f;
    for (int64_t t = first; t < last; ++t) Channels<T, N>::store(args.y, t * args.y.strides[0] + c, out);
    return;
  }
  float window[MaxW][N], weight[MaxW][N], bias[N];
  load_weights<T, N, MaxW>(args.weight, c, weight);
#pragma unroll
  for (int i = 0; i < N; ++i) bias[i] = args.bias.present() ? load(args.bias, (c + i) * args.bias.strides[0]) : 0.0f;
  // The window's last MaxW - 1 rows are the history; taps that the filter lacks stay zero.
  const int64_t history = slots.offset + W - 1;
#pragma unroll
  for (int m = 1; m < MaxW; ++m) {
    if (MaxW - m >= W) {
#pragma unroll
      for (int i = 0; i < N; ++i) window[m][i] = 0.0f;
    } else {
      extended_row<T, N>(args, slots, range, history, history + (first - range.begin) - (MaxW - m), c, window[m]);
    }
  }
  // Before y, which may be x, is written.
  if (run == 0 && slots.out >= 0) write_state<T, N>(args, slots, range, history, c);
  const bool silu = args.activation == Activation::silu;
  // Several rows are on their way before the first is looked at; y may be x, but never a row that is still to be read. What the last
  // batch computes beyond the end is not stored.
  for (int64_t base = first; base < last; base += kBatch) {
    typename Channels<T, N>::Raw raw[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) raw[b] = Channels<T, N>::load_raw(args.x, min(base + b, last - 1) * args.x.strides[0] + c);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int m = 0; m + 1 < MaxW; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i) window[m][i] = window[m + 1][i];
      Channels<T, N>::convert(raw[b], window[MaxW - 1]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float sum = bias[i];
#pragma unroll
        for (int m = 0; m < MaxW; ++m) sum = fmaf(weight[m][i], window[m][i], sum);
        out[i] = silu ? quick_silu(sum) : sum;
      }
      if (base + b < last) Channels<T, N>::store(args.y, (base + b) * args.y.strides[0] + c, out);
    }
  }
}

constexpr int kFastWidth = 4, kPack = 4;

// One dtype, rows aligned to packs, at most four taps.
bool takes_packs(const ShortConvArgs& args) {
  const auto fits = [&](const Tensor& t) { return !t.present() || (t.dtype == args.x.dtype && packs_of(t, kPack)); };
  return args.weight.size(1) <= kFastWidth && fits(args.x) && fits(args.y) && fits(args.state_in) && fits(args.state_out);
}

Cut cut_of(const Stream& stream, const ShortConvArgs& args) {
  const int64_t longest = max_tokens(args.sequences, args.x.size(0)), N = args.sequences.count;
  const int64_t pack = takes_packs(args) ? kPack : 1;
  Cut cut;
  cut.each = longest;
  cut.channel_blocks = ceil_div(args.x.size(1), kThreads * pack);
  // A run repeats W - 1 reads of its neighbour: as long as a few blocks per multiprocessor allow, and long enough that many short
  // sequences beside a long one do not make a grid of idle blocks. In place, a run's history would be overwritten: one run then.
  const int64_t blocks = int64_t{24} * facts_of(stream).multiprocessors;
  const int64_t wanted = ceil_div(longest * N * cut.channel_blocks, blocks);
  cut.run = std::clamp<int64_t>(wanted, pack > 1 ? kFastWidth : kMaxWidth, 32);  // at least W - 1: only run 0 reads the state
  cut.run = std::max(cut.run, ceil_div(longest * N, 1 << 16));
  if (args.y.data == args.x.data) cut.run = std::max<int64_t>(longest, 1);
  cut.runs = std::max<int64_t>(ceil_div(longest, cut.run), 1);  // an empty sequence hands its state on
  return cut;
}

void short_conv(const Stream& stream, const ShortConvArgs& args, Scratch) {
  if (args.x.size(1) == 0) return;
  const Cut cut = cut_of(stream, args);
  const int64_t blocks = cut.channel_blocks * cut.runs * args.sequences.count;
  const auto run = [&](auto kernel) { launch("short_conv", stream, blocks, kThreads, 0, kernel, args, cut); };
  if (!takes_packs(args)) return run(short_conv_kernel<void, 1, kMaxWidth>);
  if (args.x.dtype == DType::f32) return run(short_conv_kernel<float, kPack, kFastWidth>);
  if (args.x.dtype == DType::bf16) return run(short_conv_kernel<__nv_bfloat16, kPack, kFastWidth>);
  run(short_conv_kernel<__half, kPack, kFastWidth>);
}

Choice short_conv_choice(const Stream& stream, const ShortConvArgs& args) {
  return {std::string("cuda.short_conv") + (takes_packs(args) ? ".packs" : ".elements"),
          "runs of " + std::to_string(cut_of(stream, args).run) + " tokens"};
}

}  // namespace

OpRow<ShortConvArgs> short_conv_row() { return {short_conv, kAllFloats, nullptr, short_conv_choice}; }

}  // namespace weft::cuda
