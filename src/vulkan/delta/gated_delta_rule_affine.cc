// gated_delta_rule_compose and gated_delta_rule_apply on vulkan: lowers arguments for affine.comp.
#include "vulkan/common/recorder.h"
#include "vulkan/delta/states.h"
#include "vulkan/table.h"

namespace weft::vulkan {
namespace {

static_assert(kMaxDeltaHeadSize == 256);  // affine.comp holds a row in shared memory

struct AffineParams {
  View p, q;
  StatesView states;
  int64_t Hv = 0, rows = 0, K = 0;
};

// out = in p + q for N sequences of Hv heads, whose states have `rows` rows.
Step prepare_affine(const char* op, const Stream& stream, const Tensor& p, const Tensor& q, const DeltaStates& states,
                    int64_t rows) {
  const int64_t N = p.size(0), Hv = p.size(1);
  return prepare(op, stream, {"affine"}, AffineParams{view_of(p), view_of(q), view_of(states), Hv, rows, p.size(3)}, N * Hv * rows);
}

void compose(const Stream& stream, const GatedDeltaRuleComposeArgs& args) {
  DeltaStates maps;
  maps.in = args.p1;
  maps.out = args.p;
  const Step linear = prepare_affine("gated_delta_rule_compose", stream, args.p2, {}, maps, args.p1.size(2));
  maps.in = args.q1;
  maps.out = args.q;
  const Step offset = prepare_affine("gated_delta_rule_compose", stream, args.p2, args.q2, maps, args.q1.size(2));
  record(stream, linear);
  record(stream, offset);
}

void apply(const Stream& stream, const GatedDeltaRuleApplyArgs& args) {
  record(stream, prepare_affine("gated_delta_rule_apply", stream, args.p, args.q, args.states, args.q.size(2)));
}

constexpr Limits slow(Limits limits) {
  limits.speed = Speed::slow;  // products without tiles
  return limits;
}

}  // namespace

OpEntry<GatedDeltaRuleComposeArgs> gated_delta_rule_compose_entry() { return entry<compose>(slow(kOnlyF32)); }
OpEntry<GatedDeltaRuleApplyArgs> gated_delta_rule_apply_entry() { return entry<apply>(slow(kAllFloats)); }

}  // namespace weft::vulkan
