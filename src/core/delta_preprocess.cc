// What legal arguments of delta_gates, short_conv, l2_norm and gated_rms_norm are.
#include "weft/delta_preprocess.h"

#include "core/delta_check.h"
#include "core/limits.h"
#include "core/op_limits.h"

namespace weft {

Check& check_taps(Check& check) {
  const int64_t taps = check.dim("W");
  return check.require(taps >= kMinConvWidth && taps <= kMaxConvWidth, "weight", [&] {
    return "has W=" + std::to_string(taps) + " taps, wanted " + std::to_string(kMinConvWidth) + " to " +
           std::to_string(kMaxConvWidth);
  });
}

Status validate(const DeltaGatesArgs& args) {
  Check check("delta_gates");
  check.members(args);
  check.require(args.b.present() == args.beta.present(), args.b.present() ? "beta" : "b", "is absent, but b and beta go together");
  return std::move(check.memory(args)).status();
}

Status validate(const ShortConvArgs& args) {
  Check check("short_conv");
  check.members(args);
  const int64_t taps = check.dim("W"), rows = check.dim("L");
  check.require(rows < 0 || rows >= taps - 1, args.state_in.present() ? "state_in" : "state_out",
                [&] { return "holds L=" + std::to_string(rows) + " rows, wanted at least W - 1 = " + std::to_string(taps - 1); });
  const Tensor& out_slots = args.state_out_slots.present() ? args.state_out_slots : args.state_in_slots;
  check_slots(check, "state_in", args.state_in, args.state_in_slots);
  check_slots(check, "state_out", args.state_out, out_slots);
  return std::move(check.memory(args)).status();
}

Status validate(const L2NormArgs& args) {
  Check check("l2_norm");
  check.members(args).memory(args);  // before sizes are compared: ranks must be sane
  bool equal = args.x.rank == args.y.rank;
  for (int i = 0; check.ok() && equal && i < args.x.rank; ++i) equal = args.x.sizes[i] == args.y.sizes[i];
  check.require(equal, "y", [&] { return "is " + shape_text(args.y) + ", wanted the shape of x, " + shape_text(args.x); });
  return std::move(check).status();
}

Status validate(const GatedRmsNormArgs& args) {
  Check check("gated_rms_norm");
  return std::move(check.members(args).memory(args)).status();
}

std::string legal_shapes(const DeltaGatesArgs&) { return "any"; }
std::string legal_shapes(const ShortConvArgs&) {
  return "W " + std::to_string(kMinConvWidth) + " to " + std::to_string(kMaxConvWidth) + ", any C";
}
std::string legal_shapes(const L2NormArgs&) { return "any"; }
std::string legal_shapes(const GatedRmsNormArgs&) { return "any"; }

}  // namespace weft
