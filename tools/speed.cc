// `weft speed`: tokens per second of a model, by batch.
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <random>

#include "tools/conditions.h"
#include "tools/json_output.h"
#include "tools/model_command.h"
#include "tools/terminal.h"
#include "tools/validators.h"
#include "weft/limits.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

struct SpeedFlags {
  ModelFlags model;
  std::vector<int64_t> batch{1, 8, 64};
  std::vector<std::string> compare;
  int64_t prompt = 512, decode = 64, context = 0;
  JsonOutput output;
};

struct Speed {
  double prefill = 0, decode = 0;  // seconds
};

// Every sequence gets its prompt in one append, then the most probable token, one at a time. Tokens between the prompt and the
// context are added to the state without being computed: their memory holds garbage.
Speed measure(const Model& model, const Stream& stream, HybridState& state, int64_t batch, const SpeedFlags& flags) {
  const int64_t prompt = flags.prompt, decode = flags.decode;
  std::mt19937_64 random(1);
  std::vector<std::vector<int32_t>> prompts(static_cast<size_t>(batch));
  for (auto& tokens : prompts)
    for (int64_t i = 0; i < prompt; ++i)
      tokens.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(model.vocab_size())));
  std::vector<int32_t> next(static_cast<size_t>(batch)), best(static_cast<size_t>(batch));
  const auto append = [&](bool first) {
    std::vector<ModelInput> inputs;
    for (int64_t n = 0; n < batch; ++n) {
      const auto i = static_cast<size_t>(n);
      inputs.push_back(
          {.sequence = n, .tokens = first ? std::span<const int32_t>(prompts[i]) : std::span(&next[i], 1), .best = &best[i]});
    }
    model.append(stream, state, inputs);
    next = best;
  };
  const auto seconds = [](std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  Speed speed;
  // The first round warms up memory, kernels and graphs. The second is measured.
  for (int round = 0; round < 2; ++round) {
    state.reset();
    auto begin = std::chrono::steady_clock::now();
    append(true);
    speed.prefill = seconds(begin);
    for (int64_t n = 0; n < batch && prompt < flags.context; ++n)
      state.append(std::array{SequenceTokens{n, flags.context - prompt}});
    if (round == 0)
      for (int i = 0; i < 3; ++i) append(false);
    begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < decode && round > 0; ++i) append(false);
    speed.decode = seconds(begin);
  }
  return speed;
}

int run_speed(const SpeedFlags& flags) {
  flags.output.check_writable();
  if (flags.context > 0 && flags.context < flags.prompt)
    throw UsageError(fmt::format("--context {} does nothing: it is less than --prompt {}", flags.context, flags.prompt));
  const Stream stream = flags.model.stream();
  const Model model = flags.model.load();
  const int64_t capacity = std::max(flags.prompt, flags.context) + std::max<int64_t>(flags.decode, 3);
  const std::vector<std::string> policies = kv_policies(model, stream, flags.model.kv, flags.compare);
  Table table({"kv", "batch", "prefill tokens/s", "decode tokens/s", "step ms", "peak memory"},
              {false, true, true, true, true, true});
  Json all = Json::array();
  const Json where = conditions(stream);
  const auto add = [&](const std::string& kv, int64_t batch) {
    HybridState state = make_state(model, stream, kv, capacity, batch, 0,
                                   {.tokens = capacity, .prompt = flags.prompt, .lower = "--batch, --context, --prompt or --kv"});
    const Speed speed = measure(model, stream, state, batch, flags);
    const double prefill = static_cast<double>(batch * flags.prompt) / speed.prefill;
    const bool decodes = flags.decode > 0;
    const double decode = decodes ? static_cast<double>(batch * flags.decode) / speed.decode : 0;
    const int64_t peak = stream.backend == Backend::cuda ? gpu_memory(stream.device).peak : peak_memory_bytes();
    const int64_t planned = model.bytes(stream, state.plan(), capacity, flags.prompt).total();
    table.add({kv, std::to_string(batch), fmt::format("{:.0f}", prefill), decodes ? fmt::format("{:.0f}", decode) : "-",
               decodes ? fmt::format("{:.3f}", 1000 * static_cast<double>(batch) / decode) : "-", bytes_text(peak)});
    Json entry{{"schema", kSchema},
               {"backend", backend_name(stream.backend)},
               {"kv", kv},
               {"batch", batch},
               {"prompt", flags.prompt},
               {"context", std::max(flags.prompt, flags.context)},
               {"prefill_tokens_per_second", prefill},
               {"decode_tokens_per_second", decodes ? Json(decode) : Json()},
               {"planned_bytes", planned},
               {"peak_bytes", peak}};
    entry.update(where);
    all.push_back(std::move(entry));
  };
  for (const std::string& kv : policies)
    for (int64_t batch : flags.batch) add(kv, batch);
  if (flags.output.json) {
    flags.output.write(all);
    return kOk;
  }
  show("{}\nprompts of {} tokens, {} tokens decoded, {}\n\n", model.summary(), flags.prompt, flags.decode, where_text(stream));
  table.show();
  return kOk;
}

}  // namespace

void add_speed(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("speed", "Tokens per second of a model: prefill and greedy decode, by batch");
  auto flags = std::make_shared<SpeedFlags>();
  flags->model.add_options(*command);
  command->add_option("--batch", flags->batch, "Sequences in one batch; several numbers are measured one after another")
      ->capture_default_str()
      ->transform(whole_number_in(1, kMaxSequences));
  command
      ->add_option("--compare", flags->compare,
                   "KV formats to compare, instead of --kv. Give larger ones last: the peak of memory never falls")
      ->excludes(command->get_option("--kv"));
  command->add_option("-p,--prompt", flags->prompt, "Random tokens of every prompt")
      ->capture_default_str()
      ->transform(whole_number_in(1, int64_t{1} << 30));
  command->add_option("--decode", flags->decode, "Tokens to decode after the prompt")
      ->capture_default_str()
      ->transform(whole_number_in(0, int64_t{1} << 30));
  command
      ->add_option("--context", flags->context,
                   "Decode as if this many tokens had come before: their memory exists and is read, but was not computed")
      ->transform(whole_number_in(0, int64_t{1} << 30));
  flags->output.add_options(*command);
  command->footer(
      "Examples:\n"
      "  weft speed --batch 1 --prompt 128                     the bundled model, on the cpu\n"
      "  weft speed --backend cuda --batch 16 --prompt 2048 --decode 0\n"
      "  weft speed --backend cuda --model DIR --compare 4v4 8v4 f16 --prompt 32768 --json");
  command->callback([flags, &exit] { exit = run_speed(*flags); });
}

}  // namespace weft::tools
