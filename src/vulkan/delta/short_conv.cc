// short_conv on vulkan: lowers arguments for short_conv.comp.
#include <algorithm>
#include <string>

#include "vulkan/common/recorder.h"
#include "vulkan/common/views.h"
#include "vulkan/table.h"

namespace weft::vulkan {
namespace {

constexpr int64_t kThreads = 128;
// Least tokens of a run. A run reads the W - 1 rows before its own. Only run 0 may read such rows from the state, so a run has at
// least W - 1 tokens.
constexpr int64_t kRun = 32;

struct ConvParams {
  View x, weight, bias, y, state_in, state_out;
  SequencesView sequences;
  Indices in_slots, out_slots, has_initial, offsets;
  int64_t run = 0, runs = 0, channel_blocks = 0;
  uint32_t silu = 0, pad = 0;
};

struct Plan {
  int64_t run = 0, runs = 0;
  size_t scratch_bytes = 0;
};

// In place, one run takes the whole sequence, because a first run would overwrite the rows that a second run reads. Runs grow with
// the number of sequences: many short sequences beside a long one must not make a grid of idle workgroups.
Plan plan_conv(const Stream&, const ShortConvArgs& args) {
  const int64_t longest = max_tokens(args.sequences, args.x.size(0));
  Plan plan;
  plan.run = std::max(kRun, ceil_div(longest * args.sequences.count, 1 << 16));
  if (args.y.data == args.x.data) plan.run = std::max<int64_t>(longest, 1);
  plan.runs = std::max<int64_t>(ceil_div(longest, plan.run), 1);  // also for empty sequences, whose state is copied
  return plan;
}

Choice describe_conv(const Stream&, const ShortConvArgs&, const Plan& plan) {
  return {"vulkan.short_conv.elements", "a thread per channel, runs of " + std::to_string(plan.run) + " tokens", Speed::portable};
}

void short_conv(const Stream& stream, const ShortConvArgs& args, const Plan& plan, Scratch) {
  const int64_t channel_blocks = ceil_div(args.x.size(1), kThreads);
  const ConvParams params{view_of(args.x),
                          view_of(args.weight),
                          view_of(args.bias),
                          view_of(args.y),
                          view_of(args.state_in),
                          view_of(args.state_out),
                          view_of(args.sequences, args.x.size(0)),
                          indices_of(args.state_in_slots),
                          indices_of(args.state_out_slots),
                          indices_of(args.has_initial),
                          indices_of(args.state_offsets),
                          plan.run,
                          plan.runs,
                          channel_blocks,
                          args.activation == Activation::silu};
  dispatch("short_conv", stream, {"short_conv"}, params, channel_blocks * plan.runs * args.sequences.count);
}

}  // namespace

OpEntry<ShortConvArgs> short_conv_entry() { return entry<plan_conv, describe_conv, short_conv>(kAllFloats); }

}  // namespace weft::vulkan
