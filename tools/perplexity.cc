// `weft perplexity`: how well a model predicts a text, with one or several KV formats.
#include "weft/perplexity.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>

#include "tools/interrupt.h"
#include "tools/json_output.h"
#include "tools/model_command.h"
#include "tools/terminal.h"
#include "tools/text_file.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

struct PerplexityFlags {
  ModelFlags model;
  std::string file;
  std::vector<std::string> compare;
  int64_t context = 2048, stride = 0, max_tokens = 0;
  JsonOutput output;
};

Json json_of(const Stream& stream, const std::string& kv, const Perplexity& p, int64_t bytes) {
  return {{"schema", kSchema},
          {"perplexity", number_or_null(std::exp(p.nll))},
          {"nll", number_or_null(p.nll)},
          {"tokens", p.tokens},
          {"kv", kv},
          {"bytes_per_token", bytes},
          {"backend", backend_name(stream.backend)}};
}

// The text to predict: --file, or the excerpt in the model's directory.
std::string text_file(const PerplexityFlags& flags, const std::string& directory) {
  if (!flags.file.empty()) return flags.file;
  const std::filesystem::path excerpt = std::filesystem::path(directory) / "valid-excerpt.txt";
  if (std::filesystem::exists(excerpt)) return excerpt.string();
  throw UsageError("give --file: " + directory + " has no valid-excerpt.txt");
}

int run_perplexity(const PerplexityFlags& flags) {
  flags.output.check_writable({flags.file});
  if (flags.context == 0 && flags.stride > 0)
    throw UsageError("--stride does nothing with --context 0, which makes the whole text one window");
  const Stream stream = flags.model.stream();
  const std::string directory = flags.model.directory();
  const Model model = flags.model.load();
  const std::string file = text_file(flags, directory);
  const std::vector<std::string> policies = kv_policies(model, stream, flags.model.kv, flags.compare);

  std::vector<int32_t> tokens = model.encode(read_input(file, "the text"));
  if (flags.max_tokens > 0 && static_cast<int64_t>(tokens.size()) > flags.max_tokens)
    tokens.resize(static_cast<size_t>(flags.max_tokens));
  if (tokens.size() < 2) throw std::runtime_error(fmt::format("{} holds {} tokens, wanted at least 2", file, tokens.size()));
  PerplexityWindows windows;
  windows.context = flags.context > 0 ? flags.context : static_cast<int64_t>(tokens.size());
  windows.stride = flags.stride > 0 ? flags.stride : windows.context;
  if (windows.stride > windows.context)
    throw UsageError(fmt::format("--stride {} is more than --context {}", windows.stride, windows.context));
  if (model.max_positions() > 0 && std::min(windows.context, static_cast<int64_t>(tokens.size())) > model.max_positions())
    tell("weft: windows are longer than the {} tokens that this model was trained for\n", model.max_positions());

  const Interrupt interrupt;
  const int64_t f16 = f16_bytes_per_token(model);
  Table table({"kv", "perplexity", "nats/token", "bytes/token", "of f16", "tokens in 1 GB", "tokens/s"},
              {false, true, true, true, true, true, true});
  Json all = Json::array();
  for (const std::string& kv : policies) {
    const int64_t most = std::min(windows.context, static_cast<int64_t>(tokens.size()));
    HybridState state = make_state(model, stream, kv, most, 1, 0, {.tokens = most, .lower = "--context or --kv"});
    const int64_t bytes = kv_bytes_per_token(state.plan());
    Perplexity p;
    {
      Progress progress(tokens.size() - 1);
      p = measure_perplexity(model, stream, state, tokens, windows, [&](int64_t done, int64_t) {
        progress.show(static_cast<size_t>(done), "tokens with kv " + kv);
        return !Interrupt::asked();
      });
    }
    if (!p.complete) {
      tell("weft: interrupted at {} of {} tokens with kv {}; perplexity so far {:.3f}\n", p.tokens, tokens.size() - 1, kv,
           std::exp(p.nll));
      return Interrupt::exit_status();
    }
    all.push_back(json_of(stream, kv, p, bytes));
    table.add({kv, fmt::format("{:.3f}", std::exp(p.nll)), fmt::format("{:.4f}", p.nll), std::to_string(bytes),
               bytes > 0 ? fmt::format("{:.1f} %", 100.0 * static_cast<double>(bytes) / static_cast<double>(f16)) : "",
               bytes > 0 ? std::to_string(1000000000 / bytes) : "", fmt::format("{:.0f}", static_cast<double>(p.fed) / p.seconds)});
    tell("{}: {} tokens in {:.1f} s, {:.0f} tokens/s{}\n", kv, p.fed, p.seconds, static_cast<double>(p.fed) / p.seconds,
         times_text(stream, p.times, p.seconds));
  }
  tell("{} {}; windows of {} tokens, stride {}; {}\n", model.summary(), where_text(stream), windows.context, windows.stride,
       peak_text(stream));
  if (flags.output.json)
    flags.output.write(flags.compare.empty() ? all.front() : all);
  else
    table.show();
  return kOk;
}

}  // namespace

void add_perplexity(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("perplexity", "How well a model predicts a text, with one or several KV formats");
  auto flags = std::make_shared<PerplexityFlags>();
  flags->model.add_options(*command);
  command->add_option("--file", flags->file, "The text; - is standard input; default: valid-excerpt.txt of the model")
      ->check(file_name());
  command->add_option("--compare", flags->compare, "Several KV formats to compare, separated by spaces")
      ->excludes(command->get_option("--kv"));
  command->add_option("--context", flags->context, "Tokens of a window; 0: the whole text is one window")
      ->capture_default_str()
      ->transform(whole_number_in(0, int64_t{1} << 30));
  command
      ->add_option("--stride", flags->stride, "Tokens from the start of one window to the start of the next; default: the context")
      ->transform(whole_number_in(1, int64_t{1} << 30));
  command->add_option("-n,--max-tokens", flags->max_tokens, "Only this many tokens from the beginning of the text")
      ->transform(whole_number_in(2, int64_t{1} << 40));
  flags->output.add_options(*command, "The result as JSON: perplexity, nll (nats per token), tokens, kv, bytes_per_token");
  command->footer(
      "Examples:\n"
      "  weft perplexity                                     the bundled model and its text\n"
      "  weft perplexity --compare f16 8v4 4v4 2v2           a table\n"
      "  weft perplexity --model DIR --file book.txt --context 8192 --stride 4096 --kv 4v4,0-1:f16 --json");
  command->callback([flags, &exit] { exit = run_perplexity(*flags); });
}

}  // namespace weft::tools
