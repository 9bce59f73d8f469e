// attention_merge on vulkan: lowers arguments for attention_merge.comp.
#include "vulkan/attention/attention.h"
#include "vulkan/table.h"

namespace weft::vulkan {
namespace {

void attention_merge(const Stream& stream, const AttentionMergeArgs& args) {
  const int64_t T = args.o.size(0), Hq = args.o.size(1);
  MergeParams p;
  p.sides[0] = output_format(side_view(args.v_format), args.domain);
  p.in = lowered(partials_view(args.partials, T, Hq, args.o.size(2)));
  p.outputs = outputs_of(args.o, args.lse, args.sinks);
  p.sequences = view_of(Sequences::uniform(1), T);
  p.splits = args.partials.count;
  p.longest = T;
  p.Hq = Hq;
  p.group = Hq / args.kv_heads;
  record(stream, prepare_merge("attention_merge", stream, p));
}

}  // namespace

Step prepare_merge(const char* op, const Stream& stream, const MergeParams& params) {
  return prepare(op, stream, {"attention_merge", {rotation_constants(params.sides)[0]}}, params,
                 params.sequences.count * params.longest * params.Hq);
}

OpEntry<AttentionMergeArgs> attention_merge_entry() { return entry<attention_merge>(kAllFloats); }

}  // namespace weft::vulkan
