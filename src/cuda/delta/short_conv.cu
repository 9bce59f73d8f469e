// short_conv on cuda: a thread slides a window of registers over a run of tokens of a few neighbouring channels.
//
// Long runs come through shared memory, by copies of which every thread waits for its own: rows on their way cost no registers. Short
// ones come to registers, and all that a thread reads is on its way before anything is looked at.
#include "common/conv_slots.h"
#include "core/limits.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128, kMaxWidth = kMaxConvWidth, kFastWidth = 4;
constexpr int kRing = 4;  // batches of a thread on their way
// Blocks of N channels a thread that a multiprocessor takes.
template <int N, int Ring>
constexpr int kPlaces = N == 1     ? 1
                        : Ring > 0 ? 4
                                   : 6;

template <class Raw>
__device__ Raw shared_words(uint32_t address) {
  Raw raw;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(raw.word[0]), "=r"(raw.word[1]), "=r"(raw.word[2]), "=r"(raw.word[3])
               : "r"(address)
               : "memory");
  return raw;
}

// How the tokens of a call are cut: runs of `run` tokens, `runs` for the longest sequence.
struct Cut {
  int64_t run = 0, runs = 0, channel_blocks = 0;
  int64_t each = 0;  // tokens of every sequence, when uniform
};

// N channels of one dtype known at compile time, in packs; or (void) one of any dtype.
template <class T, int N>
struct Channels {
  using Raw = Words<T, N>;
  __device__ static Raw load(const void* data, DType, int64_t i) { return Raw::load(static_cast<const T*>(data) + i); }
  __device__ static void store(const Tensor& t, int64_t i, const Raw& raw) { raw.store(static_cast<T*>(t.data) + i); }
  __device__ static float value(const Raw& raw, int i) { return raw.at(i); }
  __device__ static Raw round(const float (&in)[N]) { return Raw::of(in); }
};
template <>
struct Channels<void, 1> {
  using Raw = float;
  __device__ static Raw load(const void* data, DType dtype, int64_t i) { return cuda::load(data, dtype, i); }
  __device__ static void store(const Tensor& t, int64_t i, Raw raw) { cuda::store(t, i, raw); }
  __device__ static float value(Raw raw, int) { return raw; }
  __device__ static Raw round(const float (&in)[1]) { return in[0]; }
};

// Row `row` of [state rows before and including the history | x], as it lies in memory; zeros before it and where the state is fresh.
template <class T, int N>
__device__ auto extended_row(const ShortConvArgs& args, const ConvSlots& slots, TokenRange range, int64_t history, int64_t row,
                             int64_t c) {
  const bool of_x = row >= history;
  const int64_t at = c + (of_x ? (range.begin + row - history) * args.x.strides[0]
                               : slots.in * args.state_in.strides[0] + row * args.state_in.strides[1]);
  typename Channels<T, N>::Raw raw{};
  if (of_x || (row >= 0 && slots.in >= 0))
    raw = Channels<T, N>::load(of_x ? args.x.data : args.state_in.data, of_x ? args.x.dtype : args.state_in.dtype, at);
  return raw;
}

// The state that a sequence leaves. Rows may move within one slot. As many as a fast filter has are read before any is written;
// more move towards the front in rising order, towards the back in falling order, so that none is overwritten before it was read.
template <class T, int N>
struct StateRows {
  static constexpr int kHeld = 3;
  typename Channels<T, N>::Raw held[kHeld];

  __device__ void read(const ShortConvArgs& args, const ConvSlots& slots, TokenRange range, int64_t history, int64_t c) {
    const int64_t L = args.state_out.size(1), shift = history + range.length() - L;
    if (L > kHeld) return;
#pragma unroll
    for (int l = 0; l < kHeld; ++l)
      if (l < L) held[l] = extended_row<T, N>(args, slots, range, history, l + shift, c);
  }
  __device__ void write(const ShortConvArgs& args, const ConvSlots& slots, TokenRange range, int64_t history, int64_t c) const {
    const int64_t L = args.state_out.size(1), shift = history + range.length() - L;
    const int64_t to = slots.out * args.state_out.strides[0] + c;
    if (L <= kHeld) {
#pragma unroll
      for (int l = 0; l < kHeld; ++l)
        if (l < L) Channels<T, N>::store(args.state_out, to + l * args.state_out.strides[1], held[l]);
      return;
    }
    for (int64_t i = 0; i < L; ++i) {
      const int64_t l = shift >= 0 ? i : L - 1 - i;
      Channels<T, N>::store(args.state_out, to + l * args.state_out.strides[1],
                            extended_row<T, N>(args, slots, range, history, l + shift, c));
    }
  }
};

// The taps of N channels, oldest first, zeros before those that the filter has.
template <int N, int MaxW>
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

// Ring: batches of rows that are on their way through shared memory, for SiLU alone; 0: the next batch comes to registers.
template <class T, int N, int MaxW, int Ring>
__global__ void __launch_bounds__(kThreads, kPlaces<N, Ring>)
    short_conv_kernel(const __grid_constant__ ShortConvArgs args, const __grid_constant__ Cut cut) {
  using Pieces = Channels<T, N>;
  using Raw = typename Pieces::Raw;
  constexpr int kBatch = MaxW - 1;  // rows after which the window's places are those at the start
  extern __shared__ __align__(16) unsigned char ring[];
  const int64_t C = args.x.size(1);
  const int W = static_cast<int>(args.weight.size(1));
  const uint32_t block = blockIdx.x, channel_blocks = static_cast<uint32_t>(cut.channel_blocks),
                 runs = static_cast<uint32_t>(cut.runs);
  const int64_t c = (int64_t{block % channel_blocks} * blockDim.x + threadIdx.x) * N;
  const int64_t run = block / channel_blocks % runs, n = block / channel_blocks / runs;
  prefetch_arguments(args);
  pdl_wait();
  pdl_launch_dependents();
  if (c >= C) return;
  const TokenRange range = tokens_of(args.sequences, n, args.x.size(0), cut.each);
  if (!range.legal) return;
  const int64_t first = range.begin + run * cut.run, rows = min(cut.run, range.end - first);
  if (run > 0 && rows <= 0) return;
  const ConvSlots slots = conv_slots(args, n);
  int64_t y = first * args.y.strides[0] + c;  // of the row that comes next
  if (slots.inert) {
    for (int64_t t = 0; t < rows; ++t, y += args.y.strides[0]) Pieces::store(args.y, y, Raw{});
    return;
  }

  // Everything is on its way before anything is looked at, and before y, which may be x, and the state are written.
  Raw next[kBatch], before[kBatch];
  int64_t asked = 0, x = first * args.x.strides[0] + c;  // rows asked for, and where the one after them is
  const auto request = [&]([[maybe_unused]] uint32_t to) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b, ++asked, x += args.x.strides[0]) {
      const bool there = asked < rows;
      if constexpr (Ring > 0)
        cp_async(to + b * kThreads * 16, static_cast<const T*>(args.x.data) + (there ? x : c), there);
      else if (there)
        next[b] = Pieces::load(args.x.data, args.x.dtype, x);
    }
    if constexpr (Ring > 0) cp_async_commit();
  };
  constexpr uint32_t kSlotBytes = kBatch * kThreads * 16;
  const uint32_t own = shared_address(ring) + threadIdx.x * 16;
#pragma unroll
  for (uint32_t slot = 0; slot < (Ring > 0 ? Ring : 1); ++slot) request(own + slot * kSlotBytes);
  const int64_t history = slots.offset + W - 1;
#pragma unroll
  for (int m = 0; m < kBatch; ++m)  // taps that the filter lacks stay zero
    before[m] =
        kBatch - m < W ? extended_row<T, N>(args, slots, range, history, history + (first - range.begin) - (kBatch - m), c) : Raw{};
  StateRows<T, N> state;
  const bool leaves = run == 0 && slots.out >= 0;
  if (leaves) state.read(args, slots, range, history, c);
  float window[kBatch][N], weight[MaxW][N], bias[N];
  load_weights<N, MaxW>(args.weight, c, weight);
#pragma unroll
  for (int i = 0; i < N; ++i) bias[i] = args.bias.present() ? load(args.bias, (c + i) * args.bias.strides[0]) : 0.0f;
#pragma unroll
  for (int m = 0; m < kBatch; ++m)
#pragma unroll
    for (int i = 0; i < N; ++i) window[m][i] = Pieces::value(before[m], i);
  if (leaves) state.write(args, slots, range, history, c);

  // A batch, of which `count` rows are there. One row at a time takes the place of the oldest.
  const bool silu = Ring > 0 || args.activation == Activation::silu;
  const auto take = [&](const Raw(&raw)[kBatch], int64_t count) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float now = Pieces::value(raw[b], i);
        float sum = bias[i];
#pragma unroll
        for (int m = 0; m < kBatch; ++m) sum = fmaf(weight[m][i], window[(b + m) % kBatch][i], sum);
        sum = fmaf(weight[kBatch][i], now, sum);
        out[i] = silu ? quick_silu(sum) : sum;
        window[b][i] = now;
      }
      if (b < count) Pieces::store(args.y, y, Pieces::round(out));
      y += args.y.strides[0];
    }
  };
  [[maybe_unused]] uint32_t slot = own;
  const auto step = [&](int64_t count) {
    Raw raw[kBatch];
    if constexpr (Ring > 0) {
      cp_async_wait<Ring - 1>();
#pragma unroll
      for (int b = 0; b < kBatch; ++b) raw[b] = shared_words<Raw>(slot + b * kThreads * 16);
      take(raw, count);
      request(slot);
      slot = slot == own + (Ring - 1) * kSlotBytes ? own : slot + kSlotBytes;
    } else {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) raw[b] = next[b];
      request(0);
      take(raw, count);
    }
  };
  int64_t left = rows;
  for (; left >= kBatch; left -= kBatch) step(kBatch);
  if (left > 0) step(left);
}

// How a call runs: `elements`, one channel of any dtype per thread; `packs`, four of one dtype, for short runs; `ring`, 16 bytes of them.
enum class Way { elements, packs, ring };

struct Plan {
  Way way = Way::elements;
  Cut cut;
};

// One dtype, rows aligned to packs, at most four taps.
bool takes_packs(const ShortConvArgs& args, int64_t pack) {
  const auto fits = [&](const Tensor& t) { return !t.present() || (t.dtype == args.x.dtype && packs_of(t, pack)); };
  return args.weight.size(1) <= kFastWidth && fits(args.x) && fits(args.y) && fits(args.state_in) && fits(args.state_out);
}

// A run reads W - 1 rows of its neighbour again, from the cache where neighbours run side by side. So it is as long as it takes to give
// every block a place, if that is not long, or else as short as its start, which loads the filter, allows.
Plan plan_of(const Stream& stream, const ShortConvArgs& args) {
  const int64_t tokens = args.x.size(0), C = args.x.size(1), longest = max_tokens(args.sequences, tokens);
  const int64_t multiprocessors = facts_of(stream).multiprocessors, wide = 16 / dtype_bytes(args.x.dtype);
  Plan plan;
  Cut& cut = plan.cut;
  cut.each = longest;
  const auto spread = [&](int64_t pack, int64_t places) {
    cut.channel_blocks = ceil_div(C, kThreads * pack);
    return ceil_div(tokens * cut.channel_blocks, places * multiprocessors);
  };
  constexpr int64_t kShortest = 16, kOneTurn = 36, kMany = 24;  // tokens of a run through the ring
  if (const int64_t run = spread(wide, kPlaces<4, kRing>);
      run >= kShortest && args.activation == Activation::silu && takes_packs(args, wide)) {
    plan.way = Way::ring;
    cut.run = run <= kOneTurn ? ceil_div(run, kFastWidth - 1) * (kFastWidth - 1) : kMany;  // whole batches
  } else if (takes_packs(args, 4)) {
    plan.way = Way::packs;
    cut.run = std::clamp<int64_t>(spread(4, kPlaces<4, 0>), kFastWidth, 32);  // at least W - 1: only run 0 reads the state
  } else {
    cut.run = std::clamp<int64_t>(spread(1, 24), kMaxWidth, 32);
  }
  // Many short sequences beside a long one should not make a grid of idle blocks. In place, a run's history would be overwritten.
  cut.run = std::max(cut.run, ceil_div(longest * args.sequences.count, 1 << 16));
  if (args.y.data == args.x.data) cut.run = std::max<int64_t>(longest, 1);
  cut.runs = std::max<int64_t>(ceil_div(longest, cut.run), 1);  // an empty sequence hands its state on
  return plan;
}

template <class T, int N, int MaxW, int Ring>
void launch_plan(const Stream& stream, const ShortConvArgs& args, const Cut& cut) {
  launch_pdl("short_conv", stream, cut.channel_blocks * cut.runs * args.sequences.count, kThreads,
             size_t{Ring} * (MaxW - 1) * kThreads * 16, short_conv_kernel<T, N, MaxW, Ring>, args, cut);
}

template <class T>
void launch_typed(const Stream& stream, const ShortConvArgs& args, const Plan& plan) {
  if (plan.way == Way::ring) return launch_plan<T, 16 / static_cast<int>(sizeof(T)), kFastWidth, kRing>(stream, args, plan.cut);
  launch_plan<T, 4, kFastWidth, 0>(stream, args, plan.cut);
}

void short_conv(const Stream& stream, const ShortConvArgs& args, Scratch) {
  if (args.x.size(1) == 0) return;
  const Plan plan = plan_of(stream, args);
  if (plan.way == Way::elements) return launch_plan<void, 1, kMaxWidth, 0>(stream, args, plan.cut);
  if (args.x.dtype == DType::f32) return launch_typed<float>(stream, args, plan);
  args.x.dtype == DType::bf16 ? launch_typed<__nv_bfloat16>(stream, args, plan) : launch_typed<__half>(stream, args, plan);
}

Choice short_conv_choice(const Stream& stream, const ShortConvArgs& args) {
  const Plan plan = plan_of(stream, args);
  const char* way = plan.way == Way::ring ? ".ring" : plan.way == Way::packs ? ".packs" : ".elements";
  return {std::string("cuda.short_conv") + way, "runs of " + std::to_string(plan.cut.run) + " tokens"};
}

}  // namespace

OpEntry<ShortConvArgs> short_conv_entry() { return {short_conv, kAllFloats, nullptr, short_conv_choice}; }

}  // namespace weft::cuda
