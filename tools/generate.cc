// `weft generate`: a model continues a text.
#include "weft/generate.h"

#include <fmt/format.h>

#include <filesystem>

#include "tools/generate_report.h"
#include "tools/host_memory.h"
#include "tools/interrupt.h"
#include "tools/json_output.h"
#include "tools/model_command.h"
#include "tools/prompt.h"
#include "tools/sampling_flags.h"
#include "tools/terminal.h"
#include "tools/validators.h"
#include "weft/limits.h"
#include "weft/tokenizer.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kDefaultPrompt = "It was a dark night, and the";

struct GenerateFlags {
  ModelFlags model;
  std::vector<std::string> prompts, files, turns, stops;
  std::optional<int64_t> max_tokens, until_sentence;
  SamplingFlags sampling;
  int64_t prefix_store = 0, draft = 0, prefix_every = 512;
  std::string prefix_storage = "f32", state;
  double wait = 60;
  bool stream = false, quiet = false, echo = false;
  JsonOutput output;
};

// Writes text to stdout as it comes, or at the end, or keeps it for JSON. A failed write stops nothing here, so that the state can
// still be saved; the command reports it at its end.
class Output {
 public:
  Output(bool stream, bool keep) : stream_(stream), keep_(keep) {}
  void write(std::string_view piece) {
    text_ += piece;
    if (stream_ && !keep_) put(piece);
  }
  void finish() {
    if (!keep_) put((stream_ ? "" : text_) + "\n");
  }

 private:
  static void put(std::string_view text) {
    write_text(Channel::out, text);
    flush_output();
  }

  bool stream_, keep_;
  std::string text_;
};

GenerateOptions options_of(const GenerateFlags& flags, const Model& model, PrefixStore* store) {
  GenerateOptions options = suggested_options(model);
  options.max_tokens = flags.max_tokens.value_or(options.max_tokens);
  flags.sampling.apply(options.sampling);
  options.stop_strings = flags.stops;
  options.sentence_after = flags.until_sentence;
  options.draft = flags.draft;
  options.store = store;
  return options;
}

// The tokens to begin with: those of the prompt, or for an empty prompt the token that begins a text.
std::vector<int32_t> first_tokens(const Model& model, const std::string& prompt) {
  std::vector<int32_t> tokens = model.encode(prompt);
  if (tokens.empty() && model.begin_token()) tokens = {*model.begin_token()};
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

GenerationReport report_of(const GenerateFlags& flags, const Stream& stream) {
  return {stream, flags.model.kv, flags.sampling.chosen_seed(), flags.draft > 0, flags.prefix_store > 0};
}

void refuse_idle_options(const GenerateFlags& flags) {
  if (flags.sampling.temperature) flags.sampling.refuse_idle(*flags.sampling.temperature);
  if (flags.output.json && flags.stream) throw UsageError("--stream does nothing with --json, which is written at the end");
  if (flags.output.json && flags.echo) throw UsageError("--echo does nothing with --json, which has the prompt in a field");
}

void check_flags(const GenerateFlags& flags) {
  std::vector<std::string> inputs = flags.files;
  if (!flags.state.empty()) inputs.insert(inputs.end(), {flags.state, flags.state + ".weft-lock"});
  flags.output.check_writable(inputs);
  refuse_idle_options(flags);
  if (flags.state.empty()) return;
  if (flags.prompts.size() + flags.files.size() > 1 || !flags.turns.empty() || flags.prefix_store > 0)
    throw UsageError("--state holds one sequence; use it with one prompt, without --turn and --prefix-store");
  if (!flags.stops.empty() || flags.until_sentence)
    throw UsageError("--state would keep tokens whose text --stop and --until-sentence cut; use it without them");
  check_state_path(flags.state);  // fails here rather than after the work
}

// The capacity of the state in tokens. On the host, memory grows with the tokens, so the capacity is the largest one. On a device,
// memory is allocated at once, so the capacity is that of the longest text. Sets `longest` to the most tokens that may come in one
// input.
int64_t capacity(const GenerateFlags& flags, const Model& model, const Stream& stream, const std::vector<std::string>& prompts,
                 bool resumes, int64_t max_tokens, int64_t& longest) {
  if (stream.backend != Backend::cuda) return kMaxTokens;
  const auto count = [&](const std::string& text) { return static_cast<int64_t>(model.encode(text).size()); };
  longest = 1;
  for (const std::string& prompt : prompts) longest = std::max(longest, count(prompt));
  if (resumes) longest += static_cast<int64_t>(read_state_file(flags.state).label.ids.size());
  for (const std::string& turn : flags.turns) longest += count(turn);
  return std::min(kMaxTokens, longest + (static_cast<int64_t>(flags.turns.size()) + 1) * (max_tokens + flags.draft + 1));
}

// Refuses a prompt that does not fit into memory. If only the generated text may not fit, there is a warning, because the text may
// end early.
void check_length(const Model& model, const Stream& stream, const HybridState& state, int64_t prompt, int64_t max_tokens) {
  const int64_t end = prompt + max_tokens;
  if (model.max_positions() > 0 && end > model.max_positions())
    tell("weft: {} tokens are more than the {} that this model was trained for\n", end, model.max_positions());
  if (stream.backend == Backend::cuda) return;  // memory of the device is allocated already
  const int64_t held = state.bytes().total();
  check_memory(model, stream, state.plan(), {.tokens = prompt, .held = held, .lower = "--kv, or shorten the prompt"});
  const int64_t wanted = hybrid_bytes(state.plan(), end).total() - held;
  if (const auto available = available_memory(); available && wanted > *available)
    tell("weft: {} tokens would take {} more memory, and {} are available; lower --max-tokens or --kv\n", end, bytes_text(wanted),
         bytes_text(*available));
}

// All prompts and turns of a command, one after another.
class Session {
 public:
  Session(const GenerateFlags& flags, const Stream& stream, const Model& model, PrefixStore* store)
      : flags_(flags),
        stream_(stream),
        model_(model),
        generator_(model, options_of(flags, model, store), stream),
        prompts_(flags.prompts) {
    flags.sampling.refuse_idle(generator_.options().sampling.temperature);
    if (flags.until_sentence && *flags.until_sentence >= generator_.options().max_tokens)
      throw UsageError(fmt::format("--until-sentence {} does nothing: the text ends after {} tokens (--max-tokens)",
                                   *flags.until_sentence, generator_.options().max_tokens));
    for (const std::string& file : flags.files) prompts_.push_back(read_prompt(file));
    if (prompts_.empty())
      if (std::optional<std::string> piped = piped_prompt()) prompts_.push_back(std::move(*piped));
    if (flags.prefix_store > 0 && prompts_.size() < 2 && flags.turns.empty())
      throw UsageError(
          "--prefix-store does nothing for one prompt, because it lives as long as the command; give more prompts or a --turn, or "
          "keep the memory in a file with --state");
    // Locks only after the prompt has been read: the prompt may come by a pipe from a process that uses the same state.
    if (!flags.state.empty()) lock_.emplace(flags.state, wait_for_state(flags.state, flags.wait));
    resumes_ = lock_ && lock_->exists();
    if (prompts_.empty()) prompts_.emplace_back(resumes_ ? "" : kDefaultPrompt);
  }

  HybridState make_state() const {
    if (!flags_.quiet) tell("{}\n", memory_text(model_, stream_, flags_.model.kv));
    int64_t longest = 0;
    const int64_t remembered = resumes_ ? read_state_file(flags_.state).tokens : 0;
    const int64_t most = capacity(flags_, model_, stream_, prompts_, resumes_, generator_.options().max_tokens, longest);
    return tools::make_state(model_, stream_, flags_.model.kv, most, 1, flags_.draft,
                             {.tokens = std::max<int64_t>(remembered, 1),
                              .prompt = longest,
                              .lower = stream_.backend == Backend::cuda ? "--max-tokens or --kv, or shorten the prompt"
                                                                        : "--kv, or shorten the prompt"});
  }

  void run(HybridState& state) {
    for (size_t i = 0; i < prompts_.size() && !interrupted_; ++i) {
      std::vector<int32_t> tokens;
      if (resumes_) {
        tokens = model_.restore(*lock_, state, 0);
        if (!flags_.quiet) tell("{}: {} tokens remembered\n", flags_.state, tokens.size());
      } else {
        state.reset(0);
      }
      for (size_t turn = 0; turn <= flags_.turns.size() && !interrupted_; ++turn) {
        if (turn > 0) state.reset(0);  // as in a server that receives the whole conversation with every turn
        run_turn(state, tokens, turn == 0 ? prompts_[i] : flags_.turns[turn - 1]);
      }
    }
  }

  const Json& results() const { return results_; }
  bool interrupted() const { return interrupted_; }

 private:
  void run_turn(HybridState& state, std::vector<int32_t>& tokens, const std::string& text) {
    const std::vector<int32_t> more = tokens.empty() ? first_tokens(model_, text) : model_.encode(text);
    tokens.insert(tokens.end(), more.begin(), more.end());
    if (static_cast<int64_t>(tokens.size()) <= state.tokens(0))
      throw UsageError(flags_.state + " has no token left to continue from; give a --prompt");
    check_length(model_, stream_, state, static_cast<int64_t>(tokens.size()), generator_.options().max_tokens);
    Output output(flags_.stream || is_terminal(Channel::out), flags_.output.json);
    ReadingProgress reading(static_cast<int64_t>(tokens.size()) - state.tokens(0), !flags_.quiet);
    bool begun = false;
    const auto begin = [&] {  // once the prompt is read, so that the line of `reading` does not follow text on a terminal
      if (begun) return;
      begun = true;
      reading.clear();
      if (flags_.echo || is_short_prompt(text))
        output.write(text);
      else if (!flags_.quiet && !flags_.output.json)
        tell("weft: the prompt has more than 2000 characters and is not repeated; --echo repeats it\n");
    };
    const auto proceed = [] { return !Interrupt::asked() && !output_fault_known(); };
    const Generation g = generator_.run(
        state, tokens,
        [&](const GeneratedToken& next) {
          begin();
          output.write(next.text);
          return proceed();
        },
        [&](int64_t done, int64_t) {
          reading.done(done);
          return proceed();
        });
    begin();
    output.finish();
    if (lock_) model_.save(*lock_, state, 0, tokens, flags_.model.kv);  // before printing, which may fail
    lock_.reset();                                                      // printing may also block; other processes must not wait
    interrupted_ = g.stop == StopReason::callback;
    if (flags_.output.json)
      results_.push_back(generation_json(g, report_of(flags_, stream_), text, kv_bytes_per_token(state.plan())));
    if (!flags_.quiet) print_phases(g, report_of(flags_, stream_));
  }

  const GenerateFlags& flags_;
  const Stream& stream_;
  const Model& model_;
  const Generator generator_;
  std::optional<StateLock> lock_;  // from load to save: no turn of another process is lost
  bool resumes_ = false, interrupted_ = false;
  std::vector<std::string> prompts_;
  Json results_ = Json::array();
};

int run_generate(const GenerateFlags& flags) {
  check_flags(flags);
  const Stream stream = flags.model.stream();
  const Model model = flags.model.load();
  const std::unique_ptr<PrefixStore> store = make_store(flags);
  Session session(flags, stream, model, store.get());
  HybridState state = session.make_state();
  const Interrupt interrupt;
  if (!flags.quiet) tell("{}\n", model.summary());
  session.run(state);
  const Json& results = session.results();
  if (flags.output.json) flags.output.write(results.size() == 1 ? results[0] : results);
  if (!flags.quiet) {
    if (store) print_store(*store);
    const int64_t bytes = kv_bytes_per_token(state.plan()), f16 = f16_bytes_per_token(model);
    tell("{}; KV {}: {} bytes per token, f16 {} ({:.2f} times as many); {}\n", where_text(stream), flags.model.kv, bytes, f16,
         bytes > 0 ? static_cast<double>(f16) / static_cast<double>(bytes) : 1, peak_text(stream));
  }
  return session.interrupted() && Interrupt::asked() ? Interrupt::exit_status() : kOk;
}

void add_text_options(CLI::App& command, GenerateFlags& flags) {
  auto* prompt =
      command
          .add_option(
              "-p,--prompt", flags.prompts,
              std::string(
                  "A text to continue. Repeat the option for several texts; each is continued by itself. Default: what is piped to "
                  "standard input, or '") +
                  kDefaultPrompt + "'")
          ->allow_extra_args(false)
          ->option_text("TEXT Excludes: --file");  // CLI11 would write "TEXT ...", as if one --prompt took several texts
  command
      .add_option("--file", flags.files,
                  "Read a text to continue from this file or pipe; - is standard input. Repeat the option for several texts")
      ->excludes(prompt)
      ->allow_extra_args(false)
      ->option_text("FILE Excludes: --prompt")
      ->check(file_name());
  command
      .add_option(
          "--turn", flags.turns,
          "After the model has written, continue with this text: the next prompt is everything so far and this text. Repeat the "
          "option for more turns")
      ->allow_extra_args(false)
      ->option_text("TEXT");
  command.add_option("-n,--max-tokens", flags.max_tokens, "Most tokens to write; default: what the model suggests, or 200")
      ->transform(whole_number_in(0, int64_t{1} << 30));
  command.add_option("--stop", flags.stops, "End the text before this string; repeat the option for more strings")
      ->allow_extra_args(false)
      ->option_text("TEXT")
      ->check(text_to_find());
  command
      .add_option("--until-sentence", flags.until_sentence, "End the text at the first end of a sentence after this many tokens")
      ->transform(whole_number_in(0, int64_t{1} << 30));
}

void add_store_options(CLI::App& command, GenerateFlags& flags) {
  command
      .add_option("--draft", flags.draft,
                  "Propose up to this many tokens from what followed the same words before, and verify them in one step; the text "
                  "stays the same")
      ->transform(whole_number_in(0, kMaxDecodeTokens - 1));
  auto* state = command.add_option(
      "--state", flags.state,
      "Keep the memory of the text in this file: continue from it where it exists, and save it at the end (see weft state)");
  state->check(file_name());
  command
      .add_option(
          "--wait", flags.wait,
          "Seconds to wait for another process that uses the same --state file, before failing with exit status 1; 0: fail at once")
      ->needs(state)
      ->capture_default_str()
      ->check(number_in(0, 1e9));
  auto* store = command.add_option("--prefix-store", flags.prefix_store,
                                   "Keep checkpoints of what was read and written in this many bytes of memory (64M, 2G). Of a "
                                   "prompt or turn that begins like an "
                                   "earlier one, only the rest is computed");
  store->transform(byte_count());
  command
      .add_option("--prefix-every", flags.prefix_every,
                  "Tokens between checkpoints, a multiple of 64; 0: only at the end of a prompt")
      ->needs(store)
      ->capture_default_str()
      ->transform(whole_number_in(0, int64_t{1} << 30));
  command
      .add_option("--prefix-storage", flags.prefix_storage,
                  "Format of recurrent states in checkpoints; all but f32 drift, and the drift is printed")
      ->needs(store)
      ->capture_default_str()
      ->check(one_of({"f32", "f16", "bf16", "int8"}));
}

}  // namespace

void add_generate(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a hybrid language model");
  auto flags = std::make_shared<GenerateFlags>();
  flags->model.add_options(*command);
  add_text_options(*command, *flags);
  flags->sampling.add_options(*command);
  add_store_options(*command, *flags);
  command->add_flag("--stream", flags->stream, "Write text as it comes; a terminal always gets it so");
  command->add_flag("--echo", flags->echo,
                    "Repeat a prompt of more than 2000 characters before its continuation, as shorter ones are");
  command->add_flag("--quiet", flags->quiet, "No statistics and no progress on stderr");
  flags->output.add_options(*command);
  command->footer(
      "Examples:\n"
      "  weft generate                                            the bundled model writes a passage\n"
      "  weft generate -p 'The ship' --seed 7 -n 400\n"
      "  echo 'The ship' | weft generate                          a piped text is the prompt\n"
      "  weft generate --until-sentence 100 --min-p 0.05          ends with a whole sentence\n"
      "  weft generate --model DIR --file notes.txt --kv 4v4 --temperature 0\n"
      "  weft generate --json | jq -r .text\n"
      "  weft generate --state story.state                        run it again and again: the story continues\n"
      "  weft generate --file long.txt --turn 'And then' --prefix-store 256M   the second turn computes three tokens\n"
      "  weft generate --draft 4 --temperature 0                  several tokens per step where text repeats itself");
  command->callback([flags, &exit] { exit = run_generate(*flags); });
}

}  // namespace weft::tools
