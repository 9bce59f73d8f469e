// The plan of memory from C: see weft/c_model.h.
#include "c_model/handles.h"

extern "C" weft_code weft_model_plan(const weft_model* model, const weft_stream* stream, const weft_plan_options* options,
                                     weft_model_bytes* bytes, weft_status* status) {
  using namespace weft::c;
  constexpr const char* kOp = "model_plan";
  return guarded(kOp, status, [&] {
    const weft::Model& of = not_null(kOp, "model", model).model;
    weft_model_bytes full = full_copy(kOp, "bytes", bytes);
    weft_plan_options given{};
    if (options) given = full_copy(kOp, "options", options);
    const int64_t context = given.context == 0 ? 4096 : given.context;
    if (given.prompt < 0 || given.prompt > context)
      refuse(kOp, "options.prompt", "is " + std::to_string(given.prompt) + ", wanted 0 to the context, " + std::to_string(context));
    const weft::Stream on = to_stream(kOp, stream);
    weft::HybridPlan plan = of.plan(given.kv ? given.kv : "8v4", context, given.sequences == 0 ? 1 : given.sequences, on);
    plan.rollback = given.rollback;
    const weft::ModelBytes found = of.bytes(on, plan, context, given.prompt);
    full.weights = found.weights;
    full.copies = found.copies;
    full.recurrent = found.state.recurrent;
    full.windows = found.state.windows;
    full.kv = found.state.kv;
    full.records = found.state.records;
    full.scratch = found.scratch;
    full.total = found.total();
    full.bytes_per_token = weft::kv_bytes_per_token(plan);
    full.bytes_per_token_f16 = weft::kv_bytes_per_token(of.plan("f16", 1));
    std::memcpy(bytes, &full, full.struct_size);
  });
}
