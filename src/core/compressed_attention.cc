// placeholder
#include "core/check.h"
namespace weft {
Status validate(const AttentionScoresArgs&) { return fail(Code::unsupported, "AttentionScores", "args", "placeholder"); }
Status validate(const AttentionValuesArgs&) { return fail(Code::unsupported, "AttentionValues", "args", "placeholder"); }
Status validate(const AttentionPartialsArgs&) { return fail(Code::unsupported, "AttentionPartials", "args", "placeholder"); }
Status validate(const AttentionMergeArgs&) { return fail(Code::unsupported, "AttentionMerge", "args", "placeholder"); }
Status validate(const CompressedAttentionArgs&) { return fail(Code::unsupported, "CompressedAttention", "args", "placeholder"); }
}  // namespace weft
