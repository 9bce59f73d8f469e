// `weft generate`: a model continues a text.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "model/parts.h"
#include "model/unicode.h"
#include "tools/model_command.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kDefaultPrompt = "It was a dark night, and the";

struct GenerateFlags {
  ModelFlags model;
  std::string prompt, file;
  std::optional<int64_t> max_tokens, top_k;
  std::optional<double> temperature, top_p;
  uint64_t seed = 1;
  bool stream = false, json = false, quiet = false;
};

Sampling sampling(const GenerateFlags& flags, const model::GenerationConfig& suggested) {
  Sampling s;
  s.temperature = flags.temperature.value_or(suggested.do_sample == false ? 0 : suggested.temperature.value_or(s.temperature));
  s.top_p = flags.top_p.value_or(suggested.top_p.value_or(s.top_p));
  s.top_k = flags.top_k.value_or(suggested.top_k.value_or(s.top_k));
  s.seed = flags.seed;
  return s;
}

// The tokens to begin with: those of the prompt, or for an empty one the token that stands between texts.
std::vector<int32_t> first_tokens(const Model& model, const std::string& prompt) {
  std::vector<int32_t> tokens = model.encode(prompt);
  const model::ModelConfig& config = model.parts().config;
  if (tokens.empty() && config.bos_id) tokens = {*config.bos_id};
  if (tokens.empty() && !config.eos_ids.empty()) tokens = {config.eos_ids.front()};
  if (tokens.empty()) throw UsageError("the prompt is empty, and the model names no token that begins a text");
  return tokens;
}

double since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Phase {
  int64_t tokens = 0;
  double seconds = 0;
  ModelTimes times;
  double rate() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};

// Writes text as it comes, or keeps it until the end.
class Output {
 public:
  Output(bool stream, bool keep) : stream_(stream), keep_(keep) {}
  void write(const std::string& piece) {
    text_ += piece;
    if (keep_ || !stream_) return;
    fmt::print("{}", piece);
    std::fflush(stdout);
  }
  void finish() {
    if (!keep_) fmt::print("{}\n", stream_ ? "" : text_);
    std::fflush(stdout);
  }
  const std::string& text() const { return text_; }

 private:
  bool stream_, keep_;
  std::string text_;
};

int run_generate(const GenerateFlags& flags) {
  const Stream stream = flags.model.stream();
  const Model model = Model::load(flags.model.directory());
  const model::GenerationConfig& suggested = model.parts().config.generation;
  const int64_t max_tokens = flags.max_tokens.value_or(suggested.max_new_tokens.value_or(200));
  Sampler sampler(sampling(flags, suggested));
  const std::string prompt = !flags.file.empty() ? read_input(flags.file) : flags.prompt;
  const std::vector<int32_t> tokens = first_tokens(model, prompt);
  const auto capacity = static_cast<int64_t>(tokens.size()) + max_tokens;
  HybridState state = HybridState::create(plan_memory(model, flags.model.kv, capacity));
  if (model.max_positions() > 0 && capacity > model.max_positions())
    fmt::print(stderr, "weft: {} tokens are more than the {} that this model was made for\n", capacity, model.max_positions());

  const Interrupt interrupt;
  Output output(flags.stream || isatty(STDOUT_FILENO), flags.json);
  std::vector<float> logits(static_cast<size_t>(model.vocab_size()));
  Phase prefill, decode;
  output.write(prompt);
  auto begin = std::chrono::steady_clock::now();
  while (prefill.tokens < static_cast<int64_t>(tokens.size()) && !Interrupt::asked()) {
    const auto chunk = std::span(tokens)
                           .subspan(static_cast<size_t>(prefill.tokens))
                           .first(std::min<size_t>(model::kStepTokens, tokens.size() - static_cast<size_t>(prefill.tokens)));
    model.append(stream, state, {{.tokens = chunk, .logits = logits.data()}}, &prefill.times);
    prefill.tokens += static_cast<int64_t>(chunk.size());
  }
  prefill.seconds = since(begin);

  model::StreamDecoder decoder(*model.parts().tokenizer);
  std::vector<int32_t> generated;
  std::string reason = "length";
  begin = std::chrono::steady_clock::now();
  while (static_cast<int64_t>(generated.size()) < max_tokens) {
    if (Interrupt::asked()) {
      reason = "interrupted";
      break;
    }
    if (!generated.empty()) {
      model.append(stream, state, {{.tokens = {&generated.back(), 1}, .logits = logits.data()}}, &decode.times);
      ++decode.tokens;
    }
    const int32_t next = sampler(logits);
    if (model.ends(next)) {
      reason = "end";
      break;
    }
    generated.push_back(next);
    output.write(decoder.push(next));
  }
  output.write(decoder.finish());
  decode.seconds = since(begin);
  output.finish();

  const int64_t bytes = kv_bytes_per_token(state.plan()), f16 = f16_bytes_per_token(model);
  if (flags.json) {
    const std::string text = output.text().substr(prompt.size());
    const Json out{{"schema", kSchema},
                   {"prompt", model::to_well_formed(prompt)},
                   {"text", text},
                   {"finish", reason},
                   {"prompt_tokens", tokens.size()},
                   {"generated_tokens", generated.size()},
                   {"ids", generated},
                   {"seed", flags.seed},
                   {"kv", flags.model.kv},
                   {"bytes_per_token", bytes},
                   {"prefill_tokens_per_second", prefill.rate()},
                   {"decode_tokens_per_second", decode.rate()},
                   {"peak_bytes", peak_memory_bytes()}};
    fmt::print("{}\n", out.dump());
  }
  if (!flags.quiet) {
    fmt::print(stderr, "\n{}\n", model.summary());
    fmt::print(stderr, "prefill {:6} tokens, {:7.0f} tokens/s: {}\n", prefill.tokens, prefill.rate(),
               times_text(prefill.times, prefill.seconds));
    fmt::print(stderr, "decode  {:6} tokens, {:7.0f} tokens/s: {}\n", decode.tokens, decode.rate(),
               times_text(decode.times, decode.seconds));
    fmt::print(stderr, "KV {}: {} bytes per token, f16 {} ({:.2f} times as many); peak memory {}\n", flags.model.kv, bytes, f16,
               bytes > 0 ? static_cast<double>(f16) / static_cast<double>(bytes) : 1, bytes_text(peak_memory_bytes()));
  }
  return reason == "interrupted" ? kInterrupted : kOk;
}

}  // namespace

void add_generate(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a hybrid language model");
  auto flags = std::make_shared<GenerateFlags>();
  flags->model.add_options(*command);
  flags->prompt = kDefaultPrompt;
  auto* prompt = command->add_option("--prompt", flags->prompt, "The text to continue")->capture_default_str();
  command->add_option("--file", flags->file, "Read the text to continue from this file; - is standard input")->excludes(prompt);
  command->add_option("--max-tokens", flags->max_tokens, "Most tokens to write; default: what the model suggests, or 200")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30));
  command
      ->add_option("--temperature", flags->temperature,
                   "0: always the most probable token; default: what the model suggests, or 0.8")
      ->check(CLI::Range(0.0, 100.0));
  command->add_option("--top-p", flags->top_p, "Only the most probable tokens that together have this probability; default 0.95")
      ->check(CLI::Range(1e-9, 1.0));
  command->add_option("--top-k", flags->top_k, "Only so many of the most probable tokens; 0: all (default)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30));
  command->add_option("--seed", flags->seed, "Of the random choices: the same seed gives the same text")->capture_default_str();
  command->add_flag("--stream", flags->stream, "Write text as it comes; always so on a terminal");
  command->add_flag("--quiet", flags->quiet, "No statistics on stderr");
  command->add_flag("--json", flags->json, "As JSON");
  command->footer(
      "Examples:\n"
      "  weft generate                                            the model that comes with Weft writes a passage\n"
      "  weft generate --prompt 'The ship' --seed 7 --max-tokens 400\n"
      "  weft generate --model DIR --file notes.txt --kv 4v4 --temperature 0\n"
      "  weft generate --json | jq -r .text");
  command->callback([flags, &exit] { exit = run_generate(*flags); });
}

}  // namespace weft::tools
