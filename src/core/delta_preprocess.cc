// What legal arguments of delta_gates, short_conv, l2_norm and gated_rms_norm are.
#include "weft/delta_preprocess.h"

#include "core/delta_check.h"
#include "core/limits.h"

namespace weft {

Status validate(const DeltaGatesArgs& args) {
  Check check("delta_gates");
  const bool per_channel = args.a.rank == 3;
  if (per_channel) {
    check.tensor("a", args.a, {"T", "Hv", "K"}).tensor("dt_bias", args.dt_bias, {"Hv", "K"}, {DType::f32});
    check.tensor("g", args.g, {"T", "Hv", "K"}, {DType::f32});
  } else {
    check.tensor("a", args.a, {"T", "Hv"}).tensor("dt_bias", args.dt_bias, {"Hv"}, {DType::f32});
    check.tensor("g", args.g, {"T", "Hv"}, {DType::f32});
  }
  check.tensor("a_log", args.a_log, {"Hv"}, {DType::f32});
  check.optional_tensor("b", args.b, {"T", "Hv"}).optional_tensor("beta", args.beta, {"T", "Hv"}, {DType::f32});
  check.require(args.b.present() == args.beta.present(), args.b.present() ? "beta" : "b", "is absent, but b and beta go together");
  return std::move(check.memory(args)).status();
}

Status validate(const ShortConvArgs& args) {
  Check check("short_conv");
  check.tensor("x", args.x, {"T", "C"}).tensor("weight", args.weight, {"C", "W"}).optional_tensor("bias", args.bias, {"C"});
  check.tensor("y", args.y, {"T", "C"});
  const int64_t taps = check.dim("W");
  check.require(taps >= kMinConvWidth && taps <= kMaxConvWidth, "weight", [&] {
    return "has W=" + std::to_string(taps) + " taps, wanted " + std::to_string(kMinConvWidth) + " to " +
           std::to_string(kMaxConvWidth);
  });
  check.known("activation", args.activation, Activation::silu);
  check.sequences("sequences", args.sequences, check.dim("T"));
  check.optional_tensor("state_in", args.state_in, {"slots", "L", "C"});
  check.optional_tensor("state_out", args.state_out, {"out slots", "L", "C"});
  if (check.ok() && check.dim("L") >= 0)
    check.require(check.dim("L") >= check.dim("W") - 1, args.state_in.present() ? "state_in" : "state_out", [&] {
      return "holds L=" + std::to_string(check.dim("L")) + " rows, wanted at least W - 1 = " + std::to_string(check.dim("W") - 1);
    });
  const Tensor& out_slots = args.state_out_slots.present() ? args.state_out_slots : args.state_in_slots;
  check_slots(check, "state_in", args.state_in, args.state_in_slots);
  check_slots(check, "state_out", args.state_out, out_slots);
  check.optional_tensor("state_in_slots", args.state_in_slots, {"N"}, {DType::i32});
  check.optional_tensor("state_out_slots", args.state_out_slots, {"N"}, {DType::i32});
  check.optional_tensor("state_offsets", args.state_offsets, {"N"}, {DType::i32});
  check.optional_tensor("has_initial", args.has_initial, {"N"}, {DType::i32});
  return std::move(check.memory(args)).status();
}

Status validate(const L2NormArgs& args) {
  Check check("l2_norm");
  check.require(args.x.present(), "x", "is absent, wanted [..., D]").require(args.y.present(), "y", "is absent, wanted [..., D]");
  for (const auto& [name, tensor] : {std::pair{"x", &args.x}, std::pair{"y", &args.y}})
    check.require(tensor->dtype == DType::f32 || tensor->dtype == DType::f16 || tensor->dtype == DType::bf16, name,
                  [dtype = tensor->dtype] { return std::string("is ") + dtype_name(dtype) + ", wanted f32, f16 or bf16"; });
  check.memory(args);  // before sizes are compared: ranks must be sane
  bool equal = args.x.rank == args.y.rank;
  for (int i = 0; check.ok() && equal && i < args.x.rank; ++i) equal = args.x.sizes[i] == args.y.sizes[i];
  check.require(equal, "y", [&] { return "is " + shape_text(args.y) + ", wanted the shape of x, " + shape_text(args.x); });
  check.not_negative("eps", args.eps);
  return std::move(check).status();
}

Status validate(const GatedRmsNormArgs& args) {
  Check check("gated_rms_norm");
  check.tensor("x", args.x, {"T", "H", "D"}).tensor("z", args.z, {"T", "H", "D"}).tensor("weight", args.weight, {"D"});
  check.tensor("y", args.y, {"T", "H", "D"});
  check.not_negative("eps", args.eps).known("gate", args.gate, Gate::sigmoid);
  return std::move(check.memory(args)).status();
}

}  // namespace weft
