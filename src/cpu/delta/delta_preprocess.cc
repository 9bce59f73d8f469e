// delta_gates, short_conv, l2_norm and gated_rms_norm on the cpu: threads over tokens, or over channels for the convolution.
// clang-format off
#include "cpu/common/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta/delta_preprocess.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include "cpu/delta/delta_preprocess-inl.h"

#if HWY_ONCE

#include <algorithm>
#include <string>

#include "common/conv_slots.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/table.h"

namespace weft::cpu {

HWY_EXPORT(gates_rows);
HWY_EXPORT(conv_channels);
HWY_EXPORT(conv_span);
HWY_EXPORT(l2_norm_rows);
HWY_EXPORT(gated_rms_norm_rows);

namespace {

// Rows of one task: enough work to outweigh the cost of scheduling it.
int64_t rows_per_task(int64_t rows, int64_t numbers_per_row) {
  return std::clamp<int64_t>(16384 / std::max<int64_t>(1, numbers_per_row), 1, std::max<int64_t>(1, rows));
}

// How a call is spread over threads.
struct SplitPlan {
  Isa isa = Isa::best;
  Threads threads;
  int64_t step = 1;  // rows of a task, or tasks of the channels
  size_t scratch_bytes = 0;
};

SplitPlan plan_rows(const Stream& stream, int64_t rows, int64_t numbers_per_row) {
  // About ten operations a number, exponentials included.
  return {stream.isa, worth_threads(stream, 10.0 * static_cast<double>(rows * numbers_per_row)),
          rows_per_task(rows, numbers_per_row)};
}

template <class F>
void for_rows(const SplitPlan& plan, int64_t rows, F&& work) {
  const int64_t tasks = (rows + plan.step - 1) / plan.step;
  parallel_for(plan.threads, tasks, [&](int64_t i, int) { work(i * plan.step, std::min(rows, (i + 1) * plan.step)); });
}

SplitPlan plan_gates(const Stream& stream, const DeltaGatesArgs& args) {
  return plan_rows(stream, args.a.size(0), args.a.size(1) * (args.a.rank == 3 ? args.a.size(2) : 1));
}

void delta_gates(const Stream&, const DeltaGatesArgs& args, const SplitPlan& plan, Scratch) {
  GatesParams p;
  p.a = rows_view(args.a);
  p.b = rows_view(args.b);
  p.g = rows_view(args.g);
  p.beta = rows_view(args.beta);
  p.a_log = static_cast<const float*>(args.a_log.data);
  p.a_log_stride = args.a_log.strides[0];
  p.dt_bias = static_cast<const float*>(args.dt_bias.data);
  p.dt_bias_stride = args.dt_bias.strides[0];
  p.Hv = args.a.size(1);
  p.per_channel = args.a.rank == 3;
  p.K = p.per_channel ? args.a.size(2) : 1;
  p.beta_factor = args.double_beta ? 2.0f : 1.0f;
  const auto kernel = WEFT_KERNEL(plan.isa, gates_rows);
  for_rows(plan, args.a.size(0), [&](int64_t first, int64_t last) { kernel(p, first, last); });
}

SplitPlan plan_conv(const Stream& stream, const ShortConvArgs& args) {
  const int64_t T = args.x.size(0), C = args.x.size(1);
  const Threads threads = worth_threads(stream, 30.0 * static_cast<double>(T * C));
  const int64_t span = WEFT_KERNEL(stream.isa, conv_span)();
  return {stream.isa, threads, std::min<int64_t>((C + span - 1) / span, 4 * threads.working)};
}

void short_conv(const Stream&, const ShortConvArgs& args, const SplitPlan& plan, Scratch) {
  const int64_t T = args.x.size(0), C = args.x.size(1);
  ConvParams p;
  const auto over_channels = [C](const Tensor& t) { return C > 1 && t.present() ? t.stride(-1) : 1; };
  p.x = {args.x.data, args.x.dtype, args.x.strides[0], over_channels(args.x)};
  p.y = {args.y.data, args.y.dtype, args.y.strides[0], 1};
  p.weight = args.weight.data;
  p.weight_dtype = args.weight.dtype;
  p.weight_stride = args.weight.strides[0];
  p.bias = args.bias.present() ? args.bias.data : nullptr;
  p.bias_dtype = args.bias.dtype;
  p.W = args.weight.size(1);
  p.L = conv_state_rows(args);
  p.silu = args.activation == Activation::silu;
  p.state_in = args.state_in.data;
  p.in_dtype = args.state_in.dtype;
  p.in_slot_stride = args.state_in.strides[0];
  p.in_row_stride = args.state_in.strides[1];
  p.in_channel_stride = over_channels(args.state_in);
  p.state_out = args.state_out.data;
  p.out_dtype = args.state_out.dtype;
  p.out_slot_stride = args.state_out.strides[0];
  p.out_row_stride = args.state_out.strides[1];
  const auto kernel = WEFT_KERNEL(plan.isa, conv_channels);
  const int64_t span = WEFT_KERNEL(plan.isa, conv_span)();
  const int64_t spans = (C + span - 1) / span, tasks = plan.step;
  parallel_for(plan.threads, args.sequences.count * tasks, [&](int64_t i, int) {
    const int64_t n = i / tasks, task = i % tasks;
    const int64_t first = task * spans / tasks * span, last = std::min(C, (task + 1) * spans / tasks * span);
    const TokenRange range = tokens_of(args.sequences, n, T);
    if (!range.legal) return;
    const ConvSlots slots = conv_slots(args, n);
    if (slots.inert) {
      const int64_t size = dtype_bytes(args.y.dtype);
      for (int64_t t = range.begin; t < range.end; ++t)
        std::memset(static_cast<char*>(args.y.data) + (t * args.y.strides[0] + first) * size, 0,
                    static_cast<size_t>((last - first) * size));
      return;
    }
    kernel(p, range, slots.in, slots.out, slots.offset, first, last);
  });
}

// Element offset of row r of a tensor; rows are counted over the leading dimensions in row-major order.
int64_t row_offset(const Tensor& t, int64_t r) {
  int64_t offset = 0;
  for (int i = t.rank - 2; i >= 0; --i) {
    const auto dim = static_cast<size_t>(i);
    offset += r % t.sizes[dim] * t.strides[dim];
    r /= t.sizes[dim];
  }
  return offset;
}

template <class Kernel>
void norm_rows(const SplitPlan& plan, const Tensor& x, const Tensor& z, const Tensor& y, const NormParams& fixed, Kernel kernel) {
  if (x.elements() == 0) return;
  const int64_t run = x.rank > 1 ? x.size(-2) : 1;  // rows at equal strides
  const auto stride = [](const Tensor& t) { return t.rank > 1 ? t.strides[static_cast<size_t>(t.rank - 2)] : 0; };
  NormParams common = fixed;
  common.x_stride = stride(x);
  common.y_stride = stride(y);
  common.z_stride = stride(z);
  for_rows(plan, x.elements() / fixed.D, [&](int64_t first, int64_t last) {
    NormParams p = common;
    for (int64_t r = first, rows; r < last; r += rows) {
      rows = std::min(last - r, run - r % run);
      p.x_base = row_offset(x, r);
      p.y_base = row_offset(y, r);
      if (z.present()) p.z_base = row_offset(z, r);
      kernel(p, rows);
    }
  });
}

template <class Args>
SplitPlan plan_norm(const Stream& stream, const Args& args) {
  const int64_t D = args.x.size(-1);
  return plan_rows(stream, D > 0 ? args.x.elements() / D : 0, D);
}

void l2_norm(const Stream&, const L2NormArgs& args, const SplitPlan& plan, Scratch) {
  NormParams p;
  p.x = args.x.data;
  p.x_dtype = args.x.dtype;
  p.y = args.y.data;
  p.y_dtype = args.y.dtype;
  p.D = args.x.size(-1);
  p.eps = args.eps;
  norm_rows(plan, args.x, {}, args.y, p, WEFT_KERNEL(plan.isa, l2_norm_rows));
}

void gated_rms_norm(const Stream&, const GatedRmsNormArgs& args, const SplitPlan& plan, Scratch) {
  NormParams p;
  p.x = args.x.data;
  p.x_dtype = args.x.dtype;
  p.z = args.z.data;
  p.z_dtype = args.z.dtype;
  p.w = args.weight.data;
  p.w_dtype = args.weight.dtype;
  p.y = args.y.data;
  p.y_dtype = args.y.dtype;
  p.D = args.x.size(-1);
  p.eps = args.eps;
  p.silu = args.gate == Gate::silu;
  norm_rows(plan, args.x, args.z, args.y, p, WEFT_KERNEL(plan.isa, gated_rms_norm_rows));
}

Choice choice(const Stream& stream, const SplitPlan& plan, const char* op, const char* over) {
  return {std::string("cpu.") + op + "." + isa_name(resolve_isa(plan.isa)),
          "up to " + std::to_string(thread_count(stream)) + " threads over " + over};
}
Choice describe_gates(const Stream& stream, const DeltaGatesArgs&, const SplitPlan& plan) {
  return choice(stream, plan, "delta_gates", "tokens");
}
Choice describe_conv(const Stream& stream, const ShortConvArgs&, const SplitPlan& plan) {
  return choice(stream, plan, "short_conv", "sequences x channels");
}
Choice describe_l2_norm(const Stream& stream, const L2NormArgs&, const SplitPlan& plan) {
  return choice(stream, plan, "l2_norm", "rows");
}
Choice describe_rms_norm(const Stream& stream, const GatedRmsNormArgs&, const SplitPlan& plan) {
  return choice(stream, plan, "gated_rms_norm", "rows");
}

}  // namespace

OpEntry<DeltaGatesArgs> delta_gates_entry() { return entry<plan_gates, describe_gates, delta_gates>(kAllFloats); }
OpEntry<ShortConvArgs> short_conv_entry() { return entry<plan_conv, describe_conv, short_conv>(kAllFloats); }
OpEntry<L2NormArgs> l2_norm_entry() { return entry<plan_norm<L2NormArgs>, describe_l2_norm, l2_norm>(kAllFloats); }
OpEntry<GatedRmsNormArgs> gated_rms_norm_entry() {
  return entry<plan_norm<GatedRmsNormArgs>, describe_rms_norm, gated_rms_norm>(kAllFloats);
}

}  // namespace weft::cpu

#endif  // HWY_ONCE
