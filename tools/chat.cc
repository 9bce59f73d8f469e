// `weft chat`: a conversation with a model.
#include "weft/chat.h"

#include <fmt/format.h>

#include "tools/answer_writer.h"
#include "tools/chat_session.h"
#include "tools/host_memory.h"
#include "tools/interrupt.h"
#include "tools/line_editor.h"
#include "tools/model_command.h"
#include "tools/prompt.h"
#include "tools/sampling_flags.h"
#include "tools/suggest.h"
#include "tools/terminal.h"
#include "tools/validators.h"
#include "weft/limits.h"

namespace weft::tools {
namespace {

constexpr int64_t kDefaultAnswer = 4096;   // most tokens of an answer; thinking takes many
constexpr int64_t kDeviceContext = 16384;  // tokens for which memory is allocated on a device, without --context

struct ChatFlags {
  ModelFlags model;
  SamplingFlags sampling;
  std::optional<int64_t> max_tokens, context;
  int64_t draft = 0;
  std::string system, template_file, load;
  double wait = 60;
  bool show_thinking = false, no_thinking = false, quiet = false;
};

class Chat {
 public:
  Chat(const ChatFlags& flags, const Model& model, const Stream& stream, HybridState& state, const ChatTemplate& chat,
       ChatSettings settings)
      : flags_(flags),
        model_(model),
        stream_(stream),
        state_(state),
        chat_(chat),
        session_(model, stream, state, chat, std::move(settings)),
        lines_(standard_input_lines()) {}

  int run() {
    if (!flags_.load.empty()) command("load", flags_.load);
    if (lines_->interactive() && !flags_.quiet) tell("Type a message. /help lists commands, Ctrl-D ends the chat.\n");
    bool warned = false;  // after Ctrl-C at an empty prompt: a second Ctrl-C ends the chat
    for (;;) {
      const LineSource::Line line = read_message(*lines_, session_.branch() == "main" ? "> " : session_.branch() + "> ");
      if (Interrupt::asked_to_end()) return Interrupt::exit_status();
      if (line.end == LineSource::End::interrupted) {
        if (!lines_->interactive() || (warned && line.text.empty())) {
          if (lines_->interactive()) tell("\n");
          return Interrupt::exit_status();
        }
        warned = line.text.empty();
        tell("\n{}", warned ? "Ctrl-C again ends the chat, and so does Ctrl-D.\n" : "");
        Interrupt::clear();
        continue;
      }
      if (line.end == LineSource::End::finished) break;
      warned = false;
      if (!take(line.text, line.literal)) break;
      if (output_fault_known()) break;
      if (Interrupt::asked_to_end() || (Interrupt::asked() && !lines_->interactive())) return Interrupt::exit_status();
      Interrupt::clear();
    }
    if (lines_->interactive()) tell("\n");
    return kOk;
  }

 private:
  // A message or a command; false ends the chat. On a terminal, an error is a line and the chat continues.
  bool take(const std::string& text, bool literal) {
    if (text.find_first_not_of(" \t\n") == std::string::npos) return true;
    try {
      if (literal || !text.starts_with('/') || text.starts_with("//")) {
        say(!literal && text.starts_with("//") ? text.substr(1) : text);
        return true;
      }
      const size_t space = std::min(text.find_first_of(" \t\n"), text.size());
      const size_t rest = std::min(text.find_first_not_of(" \t\n", space), text.size());
      std::string argument = text.substr(rest);
      argument.resize(argument.find_last_not_of(" \t\n") + 1);
      return command(text.substr(1, space - 1), argument);
    } catch (const std::exception& error) {
      if (!lines_->interactive()) throw;
      tell("weft: {}\n", one_line(error.what()));
      return true;
    }
  }

  bool command(const std::string& name, const std::string& argument) {
    const bool wants = name == "fork" || name == "switch" || name == "save" || name == "load" || name == "system";
    if (!wants && !argument.empty() && is_command(name)) throw std::runtime_error(fmt::format("/{} takes no argument", name));
    if (name == "help")
      help();
    else if (name == "stats")
      stats();
    else if (name == "undo")
      undo();
    else if (name == "fork")
      fork(argument);
    else if (name == "switch")
      switch_to(argument);
    else if (name == "save")
      save(argument);
    else if (name == "load")
      load(argument);
    else if (name == "system")
      system(argument);
    else if (name == "quit")
      return false;
    else
      throw std::runtime_error(fmt::format(
          "there is no command /{}{}", name,
          did_you_mean("/" + name, commands(), "; /help lists the commands, and // sends a message that begins with /")));
    return true;
  }
  static std::vector<std::string> commands() {
    return {"/fork", "/help", "/load", "/quit", "/save", "/stats", "/switch", "/system", "/undo"};
  }
  static bool is_command(const std::string& name) {
    const std::vector<std::string> known = commands();
    return std::find(known.begin(), known.end(), "/" + name) != known.end();
  }

  void note(const std::string& text) const {
    if (!flags_.quiet) tell("{}\n", coloured(Colour::dim, text));
  }

  void help() const {
    tell(
        "  /undo            take back your last message and its answer\n"
        "  /fork NAME       keep the conversation so far as NAME, and continue this one\n"
        "  /switch NAME     go to the conversation NAME; the first one is main\n"
        "  /save FILE       save the conversation and its memory\n"
        "  /load FILE       replace this conversation by a saved one\n"
        "  /system TEXT     change the system message; everything is read again\n"
        "  /stats           tokens, speed and memory\n"
        "  /quit            end the chat; Ctrl-D does the same\n"
        "A message continues behind a line that ends with \\. \"\"\" begins and ends a message of several lines.\n"
        "Ctrl-C ends an answer.\n");
  }

  void say(const std::string& text) {
    AnswerWriter writer(flags_.show_thinking, flags_.quiet);
    std::optional<ReadingProgress> reading;
    const auto proceed = [] { return !Interrupt::asked() && !output_fault_known(); };
    const auto on_text = [&](const ThinkingFilter::Pieces& pieces, bool thinking) {
      if (reading) reading->clear();
      writer.write(pieces, thinking);
      return proceed();
    };
    const auto before = [&](int64_t tokens) {
      check_length(tokens);
      reading.emplace(tokens - state_.tokens(0), !flags_.quiet);
    };
    const auto on_prompt = [&](int64_t done, int64_t) {
      reading->done(done);
      return proceed();
    };
    last_ = session_.say(text, on_text, before, on_prompt);
    reading.reset();
    const Generation& g = last_->generation;
    if (!last_->read) {
      note("interrupted; the message is forgotten");
      return;
    }
    writer.finish();
    if (g.stop == StopReason::length)
      note(fmt::format("{} was cut after {} tokens; --max-tokens allows more", last_->only_thought ? "the thinking" : "the answer",
                       g.tokens.size()));
    if (g.stop == StopReason::capacity) note("the conversation fills its context; --context allows more");
    if (g.stop == StopReason::callback) note("interrupted");
    if (lines_->interactive()) tell("\n");  // an empty line before the next prompt
  }

  // Refuses a message that does not fit into memory.
  void check_length(int64_t tokens) const {
    if (model_.max_positions() > 0 && tokens > model_.max_positions() && !warned_)
      note(fmt::format("{} tokens are more than the {} that this model was trained for", tokens, model_.max_positions()));
    warned_ = model_.max_positions() > 0 && tokens > model_.max_positions();
    if (tokens > state_.plan().capacity)
      throw std::runtime_error(
          fmt::format("the conversation would have {} tokens, and its context is {}; /undo shortens it, --context "
                      "allows more",
                      tokens, state_.plan().capacity));
    if (stream_.backend != Backend::cuda)
      check_memory(model_, stream_, state_.plan(),
                   {.tokens = tokens, .held = state_.bytes().total(), .lower = "--kv, or shorten the message"});
  }

  void undo() {
    session_.undo();
    note(fmt::format("taken back; {} left", messages_text(session_.turns())));
  }
  static std::string messages_text(size_t count) { return fmt::format("{} message{}", count, count == 1 ? "" : "s"); }

  void fork(const std::string& name) {
    session_.fork(name);
    note(fmt::format("kept as {}; /switch {} goes there", name, name));
  }

  void switch_to(const std::string& name) {
    session_.switch_to(name);
    note(fmt::format("{}: {}, {} tokens", session_.branch(), messages_text(session_.turns()), session_.tokens()));
  }

  StateLockOptions lock_options(const std::string& file) const {
    return wait_for_state(file, flags_.wait, [] { return !Interrupt::asked(); });
  }

  void save(const std::string& file) {
    session_.save(file, lock_options(file));
    note(fmt::format("{}: {} tokens saved", file, session_.tokens()));
  }

  void load(const std::string& file) {
    constexpr size_t kMostShown = 400;  // bytes shown of the end of the loaded text
    const std::string text = session_.load(file, lock_options(file));
    note(fmt::format("{}: {} tokens remembered, the end of them:", file, session_.tokens()));
    size_t begin = text.size() - std::min(text.size(), kMostShown);
    while (begin < text.size() && (static_cast<unsigned char>(text[begin]) & 0xC0u) == 0x80) ++begin;
    note((begin > 0 ? "..." : "") + text.substr(begin));
  }

  void system(const std::string& text) {
    if (text.empty()) {
      note(session_.system().empty() ? "there is no system message" : "the system message: " + session_.system());
      return;
    }
    session_.set_system(text);
    note(session_.tokens() > 0 ? fmt::format("changed; {} tokens are read again with the next message", session_.tokens())
                               : "changed");
  }

  void stats() const {
    const int64_t per_token = kv_bytes_per_token(state_.plan());
    tell("{}: {}, {} tokens, {} of them still to be read; /undo takes back up to {}\n", session_.branch(),
         messages_text(session_.turns()), session_.tokens(), session_.unread(), messages_text(session_.undoable()));
    std::string names;
    for (const std::string& name : session_.branches()) names += (names.empty() ? "" : ", ") + name;
    tell("conversations: {}\n", names);
    if (last_ && last_->read) {
      const Generation& g = last_->generation;
      tell("last answer: read {} tokens, {:.0f} tokens/s; wrote {}, {:.0f} tokens/s; ended by {}\n", last_->prompt.tokens,
           last_->prompt.rate(), g.tokens.size(), g.decode.rate(),
           g.stop == StopReason::callback ? "interruption" : stop_reason_name(g.stop));
      if (flags_.draft > 0) tell("drafts: {} of {} proposed tokens accepted\n", g.draft.accepted, g.draft.proposed);
    }
    tell("memory: state {}, KV {} at {} bytes per token; undo and forks {}; {}, {}\n", bytes_text(state_.bytes().total()),
         flags_.model.kv, per_token, bytes_text(session_.snapshot_bytes()), where_text(stream_), peak_text(stream_));
  }

  const ChatFlags& flags_;
  const Model& model_;
  const Stream& stream_;
  HybridState& state_;
  const ChatTemplate& chat_;
  ChatSession session_;
  std::unique_ptr<LineSource> lines_;
  std::optional<ChatAnswer> last_;
  mutable bool warned_ = false;
};

ChatSettings settings_of(const ChatFlags& flags, const Model& model, const ChatTemplate& chat) {
  ChatSettings settings;
  settings.options = suggested_options(model);
  settings.options.max_tokens = flags.max_tokens.value_or(chat.is_plain() ? settings.options.max_tokens
                                                                          : std::max(settings.options.max_tokens, kDefaultAnswer));
  flags.sampling.apply(settings.options.sampling);
  flags.sampling.refuse_idle(settings.options.sampling.temperature);
  settings.options.draft = flags.draft;
  chat.add_stops(model, settings.options);
  settings.kv = flags.model.kv;
  settings.system = flags.system;
  if (flags.no_thinking) settings.thinking = false;
  return settings;
}

int run_chat(const ChatFlags& flags) {
  if (flags.sampling.temperature) flags.sampling.refuse_idle(*flags.sampling.temperature);
  const Stream stream = flags.model.stream();
  const ChatTemplate chat = flags.model.chat_template(flags.template_file);  // loaded before the weights, because it may be refused
  if (flags.no_thinking && !chat.has_thinking_switch())
    throw UsageError("--no-thinking does nothing: the template of this model has no switch for thinking");
  if (flags.show_thinking && !chat.may_think()) throw UsageError("--show-thinking does nothing: this template has no thinking");
  if (!flags.system.empty() && !chat.has_system())
    throw UsageError("--system does nothing: there is no system message in this template");
  const Model model = flags.model.load();
  if (!model.has_tokenizer()) throw std::runtime_error("this model has no tokenizer, so it cannot read messages");
  if (!flags.quiet) {
    tell("{}\n", model.summary());
    tell("{}\n", memory_text(model, stream, flags.model.kv));
    tell("{}\n", chat.is_plain() ? "This model has no chat template: it does not answer, it continues your text." : chat.summary());
  }
  const bool device = stream.backend == Backend::cuda;
  const int64_t trained = model.max_positions() > 0 ? model.max_positions() : kMaxTokens;
  const int64_t context = flags.context.value_or(device ? std::min(kDeviceContext, trained) : kMaxTokens);
  HybridState state = make_state(model, stream, flags.model.kv, context, 1, flags.draft, {.lower = "--context or --kv"});
  const Interrupt interrupt(/*repeats=*/true);
  try {
    return Chat(flags, model, stream, state, chat, settings_of(flags, model, chat)).run();
  } catch (const std::exception& error) {
    if (!Interrupt::asked()) throw;  // after an interrupt, the exception may come from a wait that it ended
    tell("weft: {}\n", one_line(error.what()));
    return Interrupt::exit_status();
  }
}

}  // namespace

void add_chat(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("chat", "Talk to a hybrid language model");
  auto flags = std::make_shared<ChatFlags>();
  flags->model.add_options(*command);
  command->add_option("--system", flags->system, "The system message: how the model should answer")->option_text("TEXT");
  command
      ->add_option("--template", flags->template_file,
                   "The texts around messages, for models whose chat template Weft does not know: a JSON file (docs/chat.md)")
      ->check(file_name());
  command->add_option("--load", flags->load, "Continue this saved conversation, as /load does")->check(file_name());
  command->add_flag("--show-thinking", flags->show_thinking, "Show what the model thinks before it answers");
  command->add_flag("--no-thinking", flags->no_thinking, "Ask the template for answers without thinking");
  command
      ->add_option("-n,--max-tokens", flags->max_tokens,
                   "Most tokens of an answer, thinking included; default: what the model suggests, at least 4096")
      ->transform(whole_number_in(1, int64_t{1} << 30));
  command
      ->add_option("--context", flags->context,
                   "Most tokens of a conversation; default: what memory allows, with --backend cuda 16384")
      ->transform(whole_number_in(64, kMaxTokens));
  flags->sampling.add_options(*command);
  command
      ->add_option("--draft", flags->draft,
                   "Propose up to this many tokens from what followed the same words before, and verify them in one step")
      ->transform(whole_number_in(0, kMaxDecodeTokens - 1));
  command->add_option("--wait", flags->wait, "Seconds to wait for another process that uses the same file; 0: fail at once")
      ->capture_default_str()
      ->check(number_in(0, 1e9));
  command->add_flag("--quiet", flags->quiet, "Answers and errors only");
  command->footer(
      "Commands: /undo, /fork NAME, /switch NAME, /save FILE, /load FILE, /system TEXT, /stats, /help, /quit.\n"
      "Messages may also be piped, one a line; answers go to stdout.\n"
      "\n"
      "Examples:\n"
      "  weft chat -m DIR                                         a chat model in a folder of Hugging Face files\n"
      "  weft chat -m FILE.gguf                                   a chat model in a GGUF file\n"
      "  weft chat -m DIR --system 'Be brief.' --show-thinking\n"
      "  weft chat                                                the bundled model, which continues texts\n"
      "  printf 'Hi\\nAnd now?\\n' | weft chat -m DIR --quiet       two turns of a script\n"
      "  weft chat -m DIR --load friday.chat                      continue a saved conversation");
  command->callback([flags, &exit] { exit = run_chat(*flags); });
}

}  // namespace weft::tools
