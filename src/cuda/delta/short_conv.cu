// short_conv on cuda: a thread slides a window of registers over a run of consecutive tokens, for a few neighbouring channels.
//
// Rows of long runs pass through a ring in shared memory, by cp.async copies for which every thread waits alone: rows in flight cost no
// registers. Rows of short runs are loaded to registers. Either way a thread issues all of its first loads before it uses any.
#include "common/conv_slots.h"
#include "core/limits.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/views.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128, kMaxWidth = kMaxConvWidth, kFastWidth = 4;
constexpr int kRing = 4;  // batches of a thread in flight
// Blocks per multiprocessor, with N channels per thread.
template <int N, int Ring>
constexpr int kBlocksPerSm = N == 1     ? 1
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

// ShortConvArgs lowered for kernels.
struct ConvParams {
  StridedView x, weight, bias, y;
  Activation activation = Activation::silu;
  SequencesView sequences;
  StridedView state_in, state_out;
  IndexView state_in_slots, state_out_slots, has_initial, state_offsets;
};

// How the tokens of a call are cut into runs of `run` tokens, `runs` of them for the longest sequence.
struct Cut {
  int64_t run = 0, runs = 0, channel_blocks = 0;
  int64_t each = 0;  // tokens of every sequence, when uniform
};

// Accesses to N channels in one vector of a dtype known at compile time, or (void) to one channel of any dtype.
template <class T, int N>
struct Channels {
  using Raw = Words<T, N>;
  __device__ static Raw load(const void* data, DType, int64_t i) { return Raw::load(static_cast<const T*>(data) + i); }
  __device__ static void store(const StridedView& t, int64_t i, const Raw& raw) { raw.store(static_cast<T*>(t.data) + i); }
  __device__ static float value(const Raw& raw, int i) { return raw.at(i); }
  __device__ static Raw round(const float (&in)[N]) { return Raw::of(in); }
};
template <>
struct Channels<void, 1> {
  using Raw = float;
  __device__ static Raw load(const void* data, DType dtype, int64_t i) { return cuda::load(data, dtype, i); }
  __device__ static void store(const StridedView& t, int64_t i, Raw raw) { cuda::store(t, i, raw); }
  __device__ static float value(Raw raw, int) { return raw; }
  __device__ static Raw round(const float (&in)[1]) { return in[0]; }
};

// Raw row `row` of [state rows up to the end of the history | x]; zeros before it and where the sequence starts from zeros.
template <class T, int N>
__device__ auto extended_row(const ConvParams& p, const ConvSlots& slots, TokenRange range, int64_t history, int64_t row,
                             int64_t c) {
  const bool of_x = row >= history;
  const int64_t at =
      c + (of_x ? (range.begin + row - history) * p.x.strides[0] : slots.in * p.state_in.strides[0] + row * p.state_in.strides[1]);
  typename Channels<T, N>::Raw raw{};
  if (of_x || (row >= 0 && slots.in >= 0))
    raw = Channels<T, N>::load(of_x ? p.x.data : p.state_in.data, of_x ? p.x.dtype : p.state_in.dtype, at);
  return raw;
}

// The final state of a sequence. Rows may move within one slot. Up to kHeld rows are all read before any is written. More rows move one by
// one: in ascending order towards the front, in descending order towards the back, so that no row is overwritten before it is read.
template <class T, int N>
struct StateRows {
  static constexpr int kHeld = 3;
  typename Channels<T, N>::Raw held[kHeld];

  __device__ void read(const ConvParams& p, const ConvSlots& slots, TokenRange range, int64_t history, int64_t c) {
    const int64_t L = p.state_out.size(1), shift = history + range.length() - L;
    if (L > kHeld) return;
#pragma unroll
    for (int l = 0; l < kHeld; ++l)
      if (l < L) held[l] = extended_row<T, N>(p, slots, range, history, l + shift, c);
  }
  __device__ void write(const ConvParams& p, const ConvSlots& slots, TokenRange range, int64_t history, int64_t c) const {
    const int64_t L = p.state_out.size(1), shift = history + range.length() - L;
    const int64_t to = slots.out * p.state_out.strides[0] + c;
    if (L <= kHeld) {
#pragma unroll
      for (int l = 0; l < kHeld; ++l)
        if (l < L) Channels<T, N>::store(p.state_out, to + l * p.state_out.strides[1], held[l]);
      return;
    }
    for (int64_t i = 0; i < L; ++i) {
      const int64_t l = shift >= 0 ? i : L - 1 - i;
      Channels<T, N>::store(p.state_out, to + l * p.state_out.strides[1],
                            extended_row<T, N>(p, slots, range, history, l + shift, c));
    }
  }
};

// The taps of N channels, oldest first, preceded by zeros where the filter has fewer than MaxW.
template <int N, int MaxW>
__device__ void load_weights(const StridedView& weight, int64_t c, float (&out)[MaxW][N]) {
  const int W = static_cast<int>(weight.size(1));
  if constexpr (N > 1 && MaxW == 4) {
    // The four taps of a channel are contiguous: one access loads the whole filter.
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

// Ring: batches of rows in flight through shared memory, for SiLU only; 0: the next batch is loaded to registers.
template <class T, int N, int MaxW, int Ring>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<N, Ring>)
    short_conv_kernel(const __grid_constant__ ConvParams p, const __grid_constant__ Cut cut) {
  using Access = Channels<T, N>;
  using Raw = typename Access::Raw;
  constexpr int kBatch = MaxW - 1;  // rows after which the window's indices repeat
  extern __shared__ __align__(16) unsigned char ring[];
  const int64_t C = p.x.size(1);
  const int W = static_cast<int>(p.weight.size(1));
  const uint32_t block = blockIdx.x, channel_blocks = static_cast<uint32_t>(cut.channel_blocks),
                 runs = static_cast<uint32_t>(cut.runs);
  const int64_t c = (int64_t{block % channel_blocks} * blockDim.x + threadIdx.x) * N;
  const int64_t run = block / channel_blocks % runs, n = block / channel_blocks / runs;
  prefetch_arguments(p);
  pdl_wait();
  pdl_launch_dependents();
  if (c >= C) return;
  const TokenRange range = tokens_of(p.sequences, n, p.x.size(0), cut.each);
  if (!range.legal) return;
  const int64_t first = range.begin + run * cut.run, rows = min(cut.run, range.end - first);
  if (run > 0 && rows <= 0) return;
  const ConvSlots slots = conv_slots(p, n);
  int64_t y = first * p.y.strides[0] + c;  // offset of the next output row
  if (slots.inert) {
    for (int64_t t = 0; t < rows; ++t, y += p.y.strides[0]) Access::store(p.y, y, Raw{});
    return;
  }

  // All loads are issued before any result is used, and before y, which may be x, and the state are written.
  Raw next[kBatch], before[kBatch];
  int64_t requested = 0, x = first * p.x.strides[0] + c;  // rows requested, and the offset of the next one
  const auto request = [&]([[maybe_unused]] uint32_t to) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b, ++requested, x += p.x.strides[0]) {
      const bool there = requested < rows;
      if constexpr (Ring > 0)
        cp_async(to + b * kThreads * 16, static_cast<const T*>(p.x.data) + (there ? x : c), there);
      else if (there)
        next[b] = Access::load(p.x.data, p.x.dtype, x);
    }
    if constexpr (Ring > 0) cp_async_commit();
  };
  constexpr uint32_t kSlotBytes = kBatch * kThreads * 16;
  const uint32_t own = shared_address(ring) + threadIdx.x * 16;
#pragma unroll
  for (uint32_t slot = 0; slot < (Ring > 0 ? Ring : 1); ++slot) request(own + slot * kSlotBytes);
  const int64_t history = slots.offset + W - 1;
#pragma unroll
  for (int m = 0; m < kBatch; ++m)  // rows of taps that the filter lacks are zero
    before[m] =
        kBatch - m < W ? extended_row<T, N>(p, slots, range, history, history + (first - range.begin) - (kBatch - m), c) : Raw{};
  StateRows<T, N> state;
  const bool writes_state = run == 0 && slots.out >= 0;
  if (writes_state) state.read(p, slots, range, history, c);
  float window[kBatch][N], weight[MaxW][N], bias[N];
  load_weights<N, MaxW>(p.weight, c, weight);
#pragma unroll
  for (int i = 0; i < N; ++i) bias[i] = p.bias.present() ? load(p.bias, (c + i) * p.bias.strides[0]) : 0.0f;
#pragma unroll
  for (int m = 0; m < kBatch; ++m)
#pragma unroll
    for (int i = 0; i < N; ++i) window[m][i] = Access::value(before[m], i);
  if (writes_state) state.write(p, slots, range, history, c);

  // Computes a batch, of which `count` rows exist. Each row replaces the oldest one of the window.
  const bool silu = Ring > 0 || p.activation == Activation::silu;
  const auto take = [&](const Raw(&raw)[kBatch], int64_t count) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float now = Access::value(raw[b], i);
        float sum = bias[i];
#pragma unroll
        for (int m = 0; m < kBatch; ++m) sum = fmaf(weight[m][i], window[(b + m) % kBatch][i], sum);
        sum = fmaf(weight[kBatch][i], now, sum);
        out[i] = silu ? quick_silu(sum) : sum;
        window[b][i] = now;
      }
      if (b < count) Access::store(p.y, y, Access::round(out));
      y += p.y.strides[0];
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

// Which kernel runs. `elements`: one channel of any dtype per thread. `packs`: four channels of one dtype, for short runs. `ring`: 16 bytes
// of channels, through shared memory.
enum class Kernel { elements, packs, ring };

struct Plan {
  Kernel kernel = Kernel::elements;
  Cut cut;
  size_t scratch_bytes = 0;
};

// One dtype, rows aligned to vectors of `pack` elements, at most four taps.
bool takes_packs(const ShortConvArgs& args, int64_t pack) {
  const auto fits = [&](const Tensor& t) { return !t.present() || (t.dtype == args.x.dtype && packs_of(t, pack)); };
  return args.weight.size(1) <= kFastWidth && fits(args.x) && fits(args.y) && fits(args.state_in) && fits(args.state_out);
}

// A run reads the last W - 1 rows of the run before it again, from the cache where both run at the same time. If runs that make all blocks
// resident at once are not long, runs have that length. Else they are as short as the cost of a run's start, which loads the filter, allows.
Plan plan_conv(const Stream& stream, const ShortConvArgs& args) {
  const int64_t tokens = args.x.size(0), C = args.x.size(1), longest = max_tokens(args.sequences, tokens);
  const int64_t multiprocessors = facts_of(stream).multiprocessors, wide = 16 / dtype_bytes(args.x.dtype);
  Plan plan;
  Cut& cut = plan.cut;
  cut.each = longest;
  const auto spread = [&](int64_t pack, int64_t blocks_per_sm) {
    cut.channel_blocks = ceil_div(C, kThreads * pack);
    return ceil_div(tokens * cut.channel_blocks, blocks_per_sm * multiprocessors);
  };
  constexpr int64_t kShortest = 16, kOneWave = 36, kManyWaves = 24;  // tokens of a run through the ring
  if (const int64_t run = spread(wide, kBlocksPerSm<4, kRing>);
      run >= kShortest && args.activation == Activation::silu && takes_packs(args, wide)) {
    plan.kernel = Kernel::ring;
    cut.run = run <= kOneWave ? ceil_div(run, kFastWidth - 1) * (kFastWidth - 1) : kManyWaves;  // whole batches
  } else if (takes_packs(args, 4)) {
    plan.kernel = Kernel::packs;
    cut.run = std::clamp<int64_t>(spread(4, kBlocksPerSm<4, 0>), kFastWidth, 32);  // at least W - 1: only run 0 reads the state
  } else {
    cut.run = std::clamp<int64_t>(spread(1, 24), kMaxWidth, 32);
  }
  // Many short sequences beside a long one must not make a grid of idle blocks. In place, one run takes the whole sequence: the history of a
  // second one would be overwritten.
  cut.run = std::max(cut.run, ceil_div(longest * args.sequences.count, 1 << 16));
  if (args.y.data == args.x.data) cut.run = std::max<int64_t>(longest, 1);
  cut.runs = std::max<int64_t>(ceil_div(longest, cut.run), 1);  // an empty sequence passes its state on
  return plan;
}

ConvParams lowered(const ShortConvArgs& args) {
  return {view_of(args.x),
          view_of(args.weight),
          view_of(args.bias),
          view_of(args.y),
          args.activation,
          view_of(args.sequences),
          view_of(args.state_in),
          view_of(args.state_out),
          indices_of(args.state_in_slots),
          indices_of(args.state_out_slots),
          indices_of(args.has_initial),
          indices_of(args.state_offsets)};
}

template <class T, int N, int MaxW, int Ring>
void launch_plan(const Stream& stream, const ShortConvArgs& args, const Cut& cut) {
  launch_pdl("short_conv", stream, cut.channel_blocks * cut.runs * args.sequences.count, kThreads,
             size_t{Ring} * (MaxW - 1) * kThreads * 16, short_conv_kernel<T, N, MaxW, Ring>, lowered(args), cut);
}

template <class T>
void launch_typed(const Stream& stream, const ShortConvArgs& args, const Plan& plan) {
  if (plan.kernel == Kernel::ring)
    return launch_plan<T, 16 / static_cast<int>(sizeof(T)), kFastWidth, kRing>(stream, args, plan.cut);
  launch_plan<T, 4, kFastWidth, 0>(stream, args, plan.cut);
}

void short_conv(const Stream& stream, const ShortConvArgs& args, const Plan& plan, Scratch) {
  if (args.x.size(1) == 0) return;
  if (plan.kernel == Kernel::elements) return launch_plan<void, 1, kMaxWidth, 0>(stream, args, plan.cut);
  if (args.x.dtype == DType::f32) return launch_typed<float>(stream, args, plan);
  args.x.dtype == DType::bf16 ? launch_typed<__nv_bfloat16>(stream, args, plan) : launch_typed<__half>(stream, args, plan);
}

Status supports_conv(const Stream&, const ShortConvArgs& args) {
  const auto refused = [](const char* argument, const Tensor& t) {
    return fail(Code::unsupported, "short_conv", argument,
                "has stride " + std::to_string(t.strides[t.rank - 1]) + " over channels, backend cuda wants 1");
  };
  const auto transposed = [](const Tensor& t) { return t.present() && t.size(-1) > 1 && t.stride(-1) != 1; };
  if (transposed(args.x)) return refused("x", args.x);
  if (transposed(args.state_in)) return refused("state_in", args.state_in);
  return {};
}

Choice describe_conv(const Stream&, const ShortConvArgs&, const Plan& plan) {
  const char* name = plan.kernel == Kernel::ring ? ".ring" : plan.kernel == Kernel::packs ? ".packs" : ".elements";
  return {std::string("cuda.short_conv") + name, "runs of " + std::to_string(plan.cut.run) + " tokens"};
}

}  // namespace

OpEntry<ShortConvArgs> short_conv_entry() {
  return entry<plan_conv, describe_conv, short_conv>({"f32 f16 bf16", "channels contiguous"}, supports_conv);
}

}  // namespace weft::cuda
