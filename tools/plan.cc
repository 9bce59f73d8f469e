// `weft plan`: the bytes that running a model takes, before anything is allocated.
#include <fmt/format.h>

#include "tools/json_output.h"
#include "tools/model_command.h"
#include "tools/terminal.h"
#include "tools/validators.h"
#include "weft/limits.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

struct PlanFlags {
  ModelFlags model;
  int64_t context = 4096, batch = 1, rollback = 0, prompt = 0;
  JsonOutput output;
};

int run_plan(const PlanFlags& flags) {
  flags.output.check_writable();
  const Stream stream = flags.model.stream();
  if (flags.prompt > flags.context)
    throw UsageError(fmt::format("--prompt {} is more than --context {}", flags.prompt, flags.context));
  const Model model = flags.model.load();
  HybridPlan plan = plan_memory(model, stream, flags.model.kv, flags.context, flags.batch);
  plan.rollback = flags.rollback;
  const ModelBytes bytes = [&] {
    try {
      return model.bytes(stream, plan, flags.context, flags.prompt);
    } catch (const Error& error) {
      if (error.status().op == kHybridStateOp)  // more pages than a page table can number
        throw UsageError(fmt::format("--context {} with --batch {}: {}", flags.context, flags.batch, error.what()));
      throw;
    }
  }();
  const std::optional<int64_t> available = memory_for(stream);
  const int64_t per_token = kv_bytes_per_token(plan), f16 = f16_bytes_per_token(model);
  if (flags.output.json) {
    const Json out{{"schema", kSchema},
                   {"context", flags.context},
                   {"batch", flags.batch},
                   {"prompt", flags.prompt > 0 ? flags.prompt : flags.context},
                   {"kv", flags.model.kv},
                   {"weights", bytes.weights},
                   {"weights_copied", bytes.copies},
                   {"recurrent_state", bytes.state.recurrent},
                   {"conv_state", bytes.state.windows},
                   {"kv_cache", bytes.state.kv},
                   {"records", bytes.state.records},
                   {"scratch", bytes.scratch},
                   {"total", bytes.total()},
                   {"available", available ? Json(*available) : Json()},
                   {"bytes_per_token", per_token},
                   {"bytes_per_token_f16", f16},
                   {"backend", backend_name(stream.backend)}};
    flags.output.write(out);
    return kOk;
  }
  show("{}\n{} sequence{} of {} tokens, KV {}, {}\n\n", model.summary(), flags.batch, flags.batch == 1 ? "" : "s", flags.context,
       flags.model.kv, where_text(stream));
  Table table({"memory", "bytes", ""}, {false, true, true});
  const auto add = [&](const char* name, int64_t value) { table.add({name, std::to_string(value), bytes_text(value)}); };
  if (stream.backend == Backend::cuda) {
    add("weights", bytes.weights);
  } else {
    add("weights (mapped)", bytes.weights - bytes.copies);
    add("weights (copied)", bytes.copies);
  }
  add("recurrent state", bytes.state.recurrent);
  add("convolution windows", bytes.state.windows);
  add("KV cache", bytes.state.kv);
  if (flags.rollback > 0) add("records for rollback", bytes.state.records);
  add("activations and scratch", bytes.scratch);
  add("total", bytes.total());
  if (available) add("available now", *available);
  table.show();
  show("\nKV: {} bytes per token and sequence ({} with f16), in pages of {} tokens\n", per_token, f16, kPageTokens);
  return kOk;
}

}  // namespace

void add_plan(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("plan", "Bytes that running a model takes at a context, a batch and a KV format");
  auto flags = std::make_shared<PlanFlags>();
  flags->model.add_options(*command);
  command->add_option("--context", flags->context, "Tokens of every sequence")
      ->capture_default_str()
      ->transform(whole_number_in(1, kMaxTokens));
  command->add_option("--batch", flags->batch, "Sequences")->capture_default_str()->transform(whole_number_in(1, kMaxSequences));
  command->add_option("-p,--prompt", flags->prompt, "Most tokens of one input: a prompt, or a turn. 0: as many as the context")
      ->capture_default_str()
      ->transform(whole_number_in(0, kMaxTokens));
  command->add_option("--rollback", flags->rollback, "Tokens that can be rolled back: as many as --draft of generate")
      ->capture_default_str()
      ->transform(whole_number_in(0, kMaxDecodeTokens));
  flags->output.add_options(*command);
  command->footer(
      "Examples:\n"
      "  weft plan                                           the bundled model, 4096 tokens\n"
      "  weft plan --model DIR --context 262144 --batch 8 --kv 4v4\n"
      "  weft plan --context 32768 --kv 8v4,0:f16 --json");
  command->callback([flags, &exit] { exit = run_plan(*flags); });
}

}  // namespace weft::tools
