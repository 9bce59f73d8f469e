// placeholder
#include "core/check.h"
namespace weft {
Status validate(const GatedDeltaRulePrefillArgs&) {
  return fail(Code::unsupported, "GatedDeltaRulePrefill", "args", "placeholder");
}
Status validate(const GatedDeltaRuleDecodeArgs&) { return fail(Code::unsupported, "GatedDeltaRuleDecode", "args", "placeholder"); }
Status validate(const GatedDeltaRuleReplayArgs&) { return fail(Code::unsupported, "GatedDeltaRuleReplay", "args", "placeholder"); }
Status validate(const GatedDeltaRuleSummarizeArgs&) {
  return fail(Code::unsupported, "GatedDeltaRuleSummarize", "args", "placeholder");
}
Status validate(const GatedDeltaRuleComposeArgs&) {
  return fail(Code::unsupported, "GatedDeltaRuleCompose", "args", "placeholder");
}
Status validate(const GatedDeltaRuleApplyArgs&) { return fail(Code::unsupported, "GatedDeltaRuleApply", "args", "placeholder"); }
}  // namespace weft
