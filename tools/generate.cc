// `weft generate`: a model continues a text.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <limits>

#include "files/replaced_file.h"
#include "model/parts.h"
#include "model/tokenizer/unicode.h"
#include "tools/generation.h"
#include "tools/host_memory.h"
#include "tools/interrupt.h"
#include "tools/model_command.h"
#include "tools/terminal.h"
#include "tools/validators.h"
#include "weft/state_file.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kDefaultPrompt = "It was a dark night, and the";

struct GenerateFlags {
  ModelFlags model;
  std::vector<std::string> prompts, files, turns;
  std::optional<int64_t> max_tokens, top_k;
  std::optional<double> temperature, top_p;
  uint64_t seed = 1;
  int64_t prefix_store = 0, draft = 0, prefix_every = 512;
  std::string prefix_storage = "f32", state;
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

// A store, or null.
std::unique_ptr<PrefixStore> make_store(const GenerateFlags& flags) {
  if (flags.prefix_store == 0) return nullptr;
  PrefixStoreOptions options;
  options.bytes = flags.prefix_store;
  options.every = flags.prefix_every;
  for (StateStorage storage : {StateStorage::f16, StateStorage::bf16, StateStorage::int8})
    if (flags.prefix_storage == state_storage_name(storage)) options.recurrent = storage;
  if (options.every % kPageTokens != 0) throw UsageError(fmt::format("--prefix-every wants a multiple of {}", kPageTokens));
  return std::make_unique<PrefixStore>(options);
}

Json result_json(const GenerateFlags& flags, const Stream& stream, const Generated& g, const std::string& prompt,
                 const std::string& text, int64_t bytes) {
  Json out{{"schema", kSchema},
           {"prompt", model::to_well_formed(prompt)},
           {"text", text},
           {"finish", g.finish},
           {"prompt_tokens", g.prompt_tokens},
           {"generated_tokens", g.ids.size()},
           {"ids", g.ids},
           {"seed", flags.seed},
           {"backend", backend_name(stream.backend)},
           {"kv", flags.model.kv},
           {"bytes_per_token", bytes},
           {"prefill_tokens_per_second", g.prefill.rate()},
           {"decode_tokens_per_second", g.decode.rate()},
           {"first_token_seconds", g.first_token_seconds},
           {"restored_tokens", g.restored},
           {"peak_bytes", peak_memory_bytes()}};
  if (flags.draft > 0)
    out["draft"] = {{"proposed", g.draft.proposed},
                    {"accepted", g.draft.accepted},
                    {"steps", g.draft.steps},
                    {"speed_up", g.draft.proposed > 0 ? number_or_null(g.speed_up()) : Json()}};
  return out;
}

void print_phases(const GenerateFlags& flags, const Stream& stream, const Generated& g) {
  const auto print = [&](const char* name, const Phase& phase) {
    tell("{:7} {:6} tokens{}\n", name, phase.tokens,
         phase.tokens > 0 ? fmt::format(", {:7.0f} tokens/s{}", phase.rate(), times_text(stream, phase.times, phase.seconds)) : "");
  };
  tell("\n");
  print("prefill", g.prefill);
  if (flags.prefix_store > 0)
    tell("        {:6} of {} prompt tokens restored, first token after {:.1f} ms\n", g.restored, g.prompt_tokens,
         1e3 * g.first_token_seconds);
  print("decode", g.decode);
  if (flags.draft == 0) return;
  if (g.draft.proposed == 0) {
    tell("draft        0 tokens proposed\n");
    return;
  }
  tell("draft   {:6} of {} proposed tokens accepted ({:.0f} %), {:.2f} tokens a step, {:.2f} times the speed of one by one\n",
       g.draft.accepted, g.draft.proposed, 100.0 * static_cast<double>(g.draft.accepted) / static_cast<double>(g.draft.proposed),
       static_cast<double>(g.decode.tokens) / static_cast<double>(g.draft.steps), g.speed_up());
}

void print_store(const PrefixStore& store) {
  const PrefixStoreStats stats = store.stats();
  tell("prefix store: {} checkpoints in {} of {}, {} evicted, {} too large", stats.checkpoints, bytes_text(stats.bytes),
       bytes_text(store.options().bytes), stats.evicted, stats.refused);
  if (store.options().recurrent == StateStorage::f32)
    tell("; states kept exactly\n");
  else
    tell("; states in {}, drift {:.2g} (at most {:.2g}) of their size\n", state_storage_name(store.options().recurrent),
         stats.drift, stats.largest_drift);
}

void check_flags(const GenerateFlags& flags) {
  if (flags.state.empty()) return;
  if (flags.prompts.size() + flags.files.size() > 1 || !flags.turns.empty() || flags.prefix_store > 0)
    throw UsageError("--state remembers one sequence; it goes with one prompt, without --turn and --prefix-store");
  const files::ReplacedFile probe(flags.state);  // refuses a place where nothing can be saved, before the work
}

// On the host memory comes as tokens do, and the plan only has to allow for them. A device takes it all at once: as much as the
// longest of the texts can come to, of which `longest` tokens may come in one piece.
int64_t capacity(const GenerateFlags& flags, const Model& model, const Stream& stream, const std::vector<std::string>& prompts,
                 bool resumes, int64_t max_tokens, int64_t& longest) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (stream.backend != Backend::cuda) return kMost;
  const auto count = [&](const std::string& text) { return static_cast<int64_t>(model.encode(text).size()); };
  longest = 1;
  for (const std::string& prompt : prompts) longest = std::max(longest, count(prompt));
  if (resumes) longest += static_cast<int64_t>(read_state_file(flags.state).label.ids.size());
  for (const std::string& turn : flags.turns) longest += count(turn);
  return std::min(kMost, longest + (static_cast<int64_t>(flags.turns.size()) + 1) * (max_tokens + flags.draft + 1));
}

// Refuses a prompt that memory does not hold. What comes after it may end early, so of that it only warns.
void check_length(const Model& model, const Stream& stream, const HybridState& state, int64_t prompt, int64_t max_tokens) {
  const int64_t end = prompt + max_tokens;
  if (model.max_positions() > 0 && end > model.max_positions())
    tell("weft: {} tokens are more than the {} that this model was made for\n", end, model.max_positions());
  if (stream.backend == Backend::cuda) return;  // has the memory of its capacity
  const int64_t held = state.bytes().total();
  check_memory(model, stream, state.plan(), {.tokens = prompt, .held = held, .lower = "--kv, or shorten the prompt"});
  const int64_t wanted = hybrid_bytes(state.plan(), end).total() - held;
  if (const auto available = available_memory(); available && wanted > *available)
    tell("weft: {} tokens would take {} more memory, and {} are available; lower --max-tokens or --kv\n", end, bytes_text(wanted),
         bytes_text(*available));
}

int run_generate(const GenerateFlags& flags) {
  check_flags(flags);
  const Stream stream = flags.model.stream();
  const Model model = Model::load(flags.model.directory(), flags.model.options());
  const model::GenerationConfig& suggested = model.parts().config.generation;
  const Sampling how = sampling(flags, suggested);
  GenerateOptions options{flags.max_tokens.value_or(suggested.max_new_tokens.value_or(200)), flags.draft, nullptr};
  const std::unique_ptr<PrefixStore> store = make_store(flags);
  options.store = store.get();
  const bool resumes = !flags.state.empty() && std::filesystem::exists(flags.state);
  std::vector<std::string> prompts = flags.prompts;
  for (const std::string& file : flags.files) prompts.push_back(read_input(file));
  if (prompts.empty()) prompts.emplace_back(resumes ? "" : kDefaultPrompt);

  int64_t longest = 0;
  const int64_t most = capacity(flags, model, stream, prompts, resumes, options.max_tokens, longest);
  HybridState state = make_state(model, stream, flags.model.kv, most, 1, flags.draft,
                                 {.tokens = 1, .prompt = longest, .lower = "--max-tokens or --kv, or shorten the prompt"});
  const int64_t bytes = kv_bytes_per_token(state.plan()), f16 = f16_bytes_per_token(model);
  const Interrupt interrupt;
  Json results = Json::array();
  bool interrupted = false;
  if (!flags.quiet) tell("{}\n", model.summary());
  for (size_t i = 0; i < prompts.size() && !interrupted; ++i) {
    std::vector<int32_t> tokens;
    if (resumes) {
      tokens = model.restore(flags.state, state, 0);
      if (!flags.quiet) tell("{}: {} tokens remembered\n", flags.state, tokens.size());
    } else {
      state.reset(0);
    }
    for (size_t turn = 0; turn <= flags.turns.size() && !interrupted; ++turn) {
      const std::string& text = turn == 0 ? prompts[i] : flags.turns[turn - 1];
      const std::vector<int32_t> more = tokens.empty() ? first_tokens(model, text) : model.encode(text);
      tokens.insert(tokens.end(), more.begin(), more.end());
      if (turn > 0) state.reset(0);  // as a server, which gets the whole conversation anew
      if (static_cast<int64_t>(tokens.size()) <= state.tokens(0))
        throw UsageError(flags.state + " has no token left to continue from; give a --prompt");
      check_length(model, stream, state, static_cast<int64_t>(tokens.size()), options.max_tokens);
      Sampler sampler(how);
      Output output(flags.stream || isatty(STDOUT_FILENO), flags.json);
      output.write(text);
      const Generated g = generate(model, stream, state, tokens, sampler, options, output);
      output.finish();
      if (!flags.state.empty()) model.save(flags.state, state, 0, tokens, flags.model.kv);  // first: statistics may fail
      interrupted = g.finish == "interrupted";
      if (flags.json) results.push_back(result_json(flags, stream, g, text, output.text().substr(text.size()), bytes));
      if (!flags.quiet) print_phases(flags, stream, g);
    }
  }
  if (flags.json) fmt::print("{}\n", results.size() == 1 ? results[0].dump() : results.dump());
  if (!flags.quiet) {
    if (store) print_store(*store);
    tell("{}; KV {}: {} bytes per token, f16 {} ({:.2f} times as many); {}\n", where_text(stream), flags.model.kv, bytes, f16,
         bytes > 0 ? static_cast<double>(f16) / static_cast<double>(bytes) : 1, peak_text(stream));
  }
  return interrupted ? Interrupt::exit_status() : kOk;
}

}  // namespace

void add_generate(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a hybrid language model");
  auto flags = std::make_shared<GenerateFlags>();
  flags->model.add_options(*command);
  auto* prompt =
      command
          ->add_option(
              "--prompt", flags->prompts,
              std::string(
                  "A text to continue; repeat the option for several, continued one after another, each by itself. Default: '") +
                  kDefaultPrompt + "'")
          ->allow_extra_args(false)
          ->option_text("TEXT Excludes: --file");  // CLI11 alone writes "TEXT ...", which would be several after one --prompt
  command->add_option("--file", flags->files, "Read a text to continue from this file; - is standard input; repeat it as --prompt")
      ->excludes(prompt)
      ->allow_extra_args(false)
      ->option_text("TEXT Excludes: --prompt")
      ->check(file_name());
  command
      ->add_option("--turn", flags->turns,
                   "When the model has written, go on with this text: the next prompt is everything so far, and this. Repeat the "
                   "option for more")
      ->allow_extra_args(false)
      ->option_text("TEXT");
  command->add_option("--max-tokens", flags->max_tokens, "Most tokens to write; default: what the model suggests, or 200")
      ->transform(whole_number_in(0, int64_t{1} << 30));
  command
      ->add_option("--temperature", flags->temperature,
                   "0: always the most probable token; default: what the model suggests, or 0.8")
      ->check(number_in(0, 100));
  command->add_option("--top-p", flags->top_p, "Only the most probable tokens that together have this probability; default 0.95")
      ->check(number_in(0, 1, /*above=*/true));
  command->add_option("--top-k", flags->top_k, "Only so many of the most probable tokens; 0: all (default)")
      ->transform(whole_number_in(0, int64_t{1} << 30));
  command->add_option("--seed", flags->seed, "Of the random choices: the same seed gives the same text")
      ->capture_default_str()
      ->transform(whole_number());
  command
      ->add_option(
          "--draft", flags->draft,
          "Guess up to so many tokens from what followed the same words before, and verify them in one step; the text stays")
      ->transform(whole_number_in(0, kMaxDecodeTokens - 1));
  command
      ->add_option("--state", flags->state,
                   "Remember in this file: go on from it where it exists, and save at the end (see weft state)")
      ->check(file_name());
  auto* store = command->add_option(
      "--prefix-store", flags->prefix_store,
      "Keep checkpoints of what was read and written in so many bytes of memory (64M, 2G); a prompt or turn that begins like "
      "an earlier one is read only from there on");
  store->transform(byte_count());
  command
      ->add_option("--prefix-every", flags->prefix_every,
                   "Tokens between checkpoints, a multiple of 64; 0: only at the end of a prompt")
      ->needs(store)
      ->capture_default_str()
      ->transform(whole_number_in(0, int64_t{1} << 30));
  command
      ->add_option("--prefix-storage", flags->prefix_storage,
                   "Recurrent states of checkpoints; all but f32 drift, which is printed")
      ->needs(store)
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "f16", "bf16", "int8"}));
  command->add_flag("--stream", flags->stream, "Write text as it comes; always so on a terminal");
  command->add_flag("--quiet", flags->quiet, "No statistics on stderr");
  command->add_flag("--json", flags->json, "As JSON");
  command->footer(
      "Examples:\n"
      "  weft generate                                            the model that comes with Weft writes a passage\n"
      "  weft generate --prompt 'The ship' --seed 7 --max-tokens 400\n"
      "  weft generate --model DIR --file notes.txt --kv 4v4 --temperature 0\n"
      "  weft generate --json | jq -r .text\n"
      "  weft generate --state story.state                        again and again: the story goes on\n"
      "  weft generate --file long.txt --turn 'And then' --prefix-store 256M   the second turn reads three tokens\n"
      "  weft generate --draft 4 --temperature 0                  several tokens a step where text repeats itself");
  command->callback([flags, &exit] { exit = run_generate(*flags); });
}

}  // namespace weft::tools
