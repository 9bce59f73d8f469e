// A conversation with a model: see chat_session.h.
#include "tools/chat_session.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include "tools/suggest.h"
#include "weft/tokenizer.h"

namespace weft::tools {
namespace {

constexpr size_t kMostUndo = 16;  // turns that can be taken back; each holds the recurrent state of a sequence

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error(what); }

// A message to render after an answer: the template then writes the answer as in every later prompt.
const ChatMessage kNext = {.role = "user", .content = "", .thinking = {}};

}  // namespace

ChatSession::ChatSession(const Model& model, const Stream& stream, HybridState& state, ChatTemplate chat, ChatSettings settings)
    : model_(model), stream_(stream), state_(state), chat_(std::move(chat)), settings_(std::move(settings)) {
  if (!settings_.system.empty() && !chat_.has_system()) refuse("this template has no system message");
  start_messages();
}
ChatSession::~ChatSession() = default;

void ChatSession::start_messages() {
  now_.messages.clear();
  if (!settings_.system.empty()) now_.messages.push_back({.role = "system", .content = settings_.system, .thinking = {}});
}

std::shared_ptr<const HybridSnapshot> ChatSession::snapshot() {
  if (state_.tokens(0) == 0) return nullptr;
  return std::make_shared<const HybridSnapshot>(state_.snapshot(0));
}

ChatSession::Point ChatSession::here() { return {snapshot(), now_.tokens, now_.messages.size()}; }

void ChatSession::go_to(const Point& point) {
  if (point.memory)
    state_.restore(0, *point.memory);
  else
    state_.reset(0);
  now_.tokens = point.tokens;
  now_.messages.resize(point.messages);
}

std::vector<int32_t> ChatSession::encoded(ChatRendering rendering) const {
  rendering.thinking = settings_.thinking;
  return encode_chat(model_, chat_.render(now_.messages, rendering));
}

size_t ChatSession::turns() const {
  const auto is_user = [](const ChatMessage& message) { return message.role == "user"; };
  return static_cast<size_t>(std::count_if(now_.messages.begin(), now_.messages.end(), is_user));
}

ChatAnswer ChatSession::say(const std::string& text, const OnText& on_text, const std::function<void(int64_t tokens)>& before,
                            const PromptCallback& on_prompt) {
  const Point begin = here();
  ChatAnswer answer;
  try {
    // The first turn renders the system message, too.
    const size_t first = turns() == 0 ? 0 : now_.messages.size();
    now_.messages.push_back({.role = "user", .content = to_well_formed_utf8(text), .thinking = {}});
    const std::vector<int32_t> message = encoded({.first = first, .generation_prompt = false});
    const std::vector<int32_t> prompt = encoded({.first = now_.messages.size()});
    now_.tokens.insert(now_.tokens.end(), message.begin(), message.end());
    if (now_.tokens.empty() && prompt.empty() && model_.begin_token()) now_.tokens.push_back(*model_.begin_token());
    before(static_cast<int64_t>(now_.tokens.size() + prompt.size()));

    GenerateOptions options = settings_.options;
    options.sampling.seed += turns() - 1;
    Point stable = begin;
    const auto read = [&](GenerationPhase& phase) {
      answer.prompt.tokens += phase.tokens;
      answer.prompt.seconds += phase.seconds;
    };
    if (chat_.may_think() && !prompt.empty() && unread() > 0) {  // a snapshot, for the case that the template rewrites the answer
      GenerateOptions reading = options;
      reading.max_tokens = 0;
      Generation g = Generator(model_, reading, stream_).run(state_, now_.tokens, {}, on_prompt);
      read(g.prefill);
      if (g.stop == StopReason::callback) {
        go_to(begin);
        answer.read = false;
        return answer;
      }
      stable.memory = snapshot();
    }
    stable.tokens = now_.tokens;
    stable.messages = now_.messages.size();
    now_.tokens.insert(now_.tokens.end(), prompt.begin(), prompt.end());
    if (unread() == 0) refuse("there is nothing to answer: type a message");
    const size_t written = now_.tokens.size();
    ThinkingFilter filter = chat_.filter(settings_.thinking);
    answer.generation =
        Generator(model_, options, stream_)
            .run(
                state_, now_.tokens, [&](const GeneratedToken& next) { return on_text(filter.push(next.text), filter.thinking()); },
                on_prompt);
    read(answer.generation.prefill);
    if (answer.generation.stop == StopReason::callback && answer.generation.tokens.empty()) {
      go_to(begin);
      answer.read = false;
      return answer;
    }
    on_text(filter.finish(), false);
    settle(answer.generation, written, stable, answer);
  } catch (...) {
    go_to(begin);
    throw;
  }
  now_.undo.push_back(begin);
  if (now_.undo.size() > kMostUndo) now_.undo.pop_front();
  return answer;
}

// Adds the answer, whose tokens begin at `written`, to the messages. Replaces the tokens by those that the template writes for the
// answer.
void ChatSession::settle(const Generation& g, size_t written, const Point& stable, ChatAnswer& answer) {
  // The state does not hold the token that ended the text, and the template writes an end of its own.
  if (g.stop == StopReason::end_token || g.stop == StopReason::stop_token) now_.tokens.pop_back();
  const std::vector<ChatSegment> opening =
      chat_.render(now_.messages, {.first = now_.messages.size(), .thinking = settings_.thinking});
  const std::string raw = model_.decode(std::span(now_.tokens).subspan(written));
  ThinkingFilter filter = chat_.filter(settings_.thinking);
  ThinkingFilter::Pieces pieces = filter.push(g.stop == StopReason::stop_string ? g.text : raw), rest = filter.finish();
  ChatMessage message{.role = "assistant", .content = pieces.answer + rest.answer, .thinking = {}};
  if (const std::string thought = pieces.thinking + rest.thinking; chat_.may_think()) message.thinking = thought;
  answer.only_thought = message.content.empty() && !message.thinking.value_or("").empty();
  now_.messages.push_back(std::move(message));

  std::vector<ChatSegment> segments;
  const std::string wanted = rewritten_answer(segments), had = chat_text(opening) + raw;
  const size_t end = wanted.size() - std::min(wanted.size(), had.size());  // bytes that the template writes after the text
  if (wanted.starts_with(had) && (end == 0 || (segments.back().control && segments.back().text.size() >= end))) {
    const ChatSegment closing{wanted.substr(had.size()), true};
    const std::vector<int32_t> more = encode_chat(model_, {&closing, 1});
    now_.tokens.insert(now_.tokens.end(), more.begin(), more.end());
    return;
  }
  const std::vector<ChatMessage> messages = now_.messages;
  go_to(stable);
  now_.messages = messages;
  const std::vector<int32_t> more = encode_chat(model_, segments);
  now_.tokens.insert(now_.tokens.end(), more.begin(), more.end());
  answer.reread = static_cast<int64_t>(more.size());
}

// The last message as the template writes it before a further message.
std::string ChatSession::rewritten_answer(std::vector<ChatSegment>& segments) const {
  std::vector<ChatMessage> messages = now_.messages;
  messages.push_back(kNext);
  segments = chat_.render(messages, {.first = now_.messages.size() - 1, .count = 1});
  return chat_text(segments);
}

void ChatSession::undo() {
  if (now_.undo.empty())
    refuse(turns() == 0
               ? "there is nothing to take back"
               : fmt::format("nothing more can be taken back: /undo goes back {} messages at most, and not behind /load and "
                             "/system",
                             kMostUndo));
  go_to(now_.undo.back());
  now_.undo.pop_back();
}

void ChatSession::fork(const std::string& name) {
  if (name.empty()) refuse("/fork wants a name: /fork NAME");
  if (name == name_ || others_.contains(name)) refuse(fmt::format("there is a fork '{}' already", name));
  others_.emplace(name, Parked{now_, snapshot()});
}

std::vector<std::string> ChatSession::branches() const {
  std::vector<std::string> names = {name_};
  for (const auto& [name, parked] : others_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

void ChatSession::switch_to(const std::string& name) {
  if (name == name_) return;
  const auto found = others_.find(name);
  if (found == others_.end())
    refuse(name.empty() ? "/switch wants a name: /switch NAME"
                        : fmt::format("there is no fork '{}'{}", name, did_you_mean(name, branches(), "; /stats lists them")));
  const auto parked = others_.emplace(name_, Parked{now_, snapshot()}).first;
  try {
    if (found->second.memory)
      state_.restore(0, *found->second.memory);
    else
      state_.reset(0);
    name_ = name;
  } catch (...) {
    others_.erase(parked);
    throw;
  }
  now_ = std::move(found->second.branch);
  others_.erase(found);
}

void ChatSession::set_system(const std::string& text) {
  if (!chat_.has_system())
    refuse(chat_.is_plain() ? "a model without a chat template has no system message" : "this template has no system message");
  if (now_.unknown > 0) refuse("a loaded conversation keeps its system message");
  Branch changed = now_;
  if (!changed.messages.empty() && changed.messages[0].role == "system") changed.messages.erase(changed.messages.begin());
  if (!text.empty()) changed.messages.insert(changed.messages.begin(), {.role = "system", .content = text, .thinking = {}});
  changed.undo.clear();
  changed.tokens.clear();
  if (turns() > 0) {
    std::vector<ChatMessage> messages = changed.messages;
    messages.push_back(kNext);
    changed.tokens = encode_chat(model_, chat_.render(messages, {.count = changed.messages.size()}));
  }
  now_ = std::move(changed);
  state_.reset(0);
}

void ChatSession::save(const std::string& file, const StateLockOptions& options) {
  if (file.empty()) refuse("/save wants a file: /save FILE");
  if (state_.tokens(0) == 0) refuse("there is nothing to save: nothing was read yet");
  if (file == locked_) return model_.save(*lock_, state_, 0, now_.tokens, settings_.kv);
  StateLock lock(file, options);
  if (lock.exists()) refuse(fmt::format("{} exists and is not this conversation; /load it, or choose another name", file));
  model_.save(lock, state_, 0, now_.tokens, settings_.kv);
  lock_.emplace(std::move(lock));
  locked_ = file;
}

std::string ChatSession::load(const std::string& file, const StateLockOptions& options) {
  if (file.empty()) refuse("/load wants a file: /load FILE");
  std::optional<StateLock> fresh;
  if (file != locked_) fresh.emplace(file, options);
  StateLock& lock = fresh ? *fresh : *lock_;
  if (!lock.exists()) refuse(fmt::format("{}: there is no such file", file));
  const Point begin = here();
  Branch loaded;
  // The file must end with the text that the template writes after an answer.
  const std::vector<ChatMessage> example = {kNext, {.role = "assistant", .content = "x", .thinking = {}}, kNext};
  const std::vector<ChatSegment> segments = chat_.render(example, {.first = 1, .count = 1});
  const std::string closing = segments.back().control ? segments.back().text : "";
  loaded.messages = {kNext, {.role = "assistant", .content = "", .thinking = {}}};
  loaded.unknown = loaded.messages.size();
  loaded.tokens = model_.restore(lock, state_, 0, state_.plan().capacity);
  std::string text;
  try {
    text = model_.decode(loaded.tokens);
    if (!text.ends_with(closing)) refuse(fmt::format("{}: does not end as a conversation of this template does", file));
  } catch (...) {
    go_to(begin);
    throw;
  }
  now_ = std::move(loaded);
  if (fresh) lock_ = std::move(fresh);
  locked_ = file;
  return text;
}

std::string ChatSession::system() const {
  return !now_.messages.empty() && now_.messages[0].role == "system" ? now_.messages[0].content : "";
}

int64_t ChatSession::snapshot_bytes() const {
  std::set<const HybridSnapshot*> counted;
  int64_t bytes = 0;
  const auto add = [&](const std::shared_ptr<const HybridSnapshot>& memory) {
    if (memory && counted.insert(memory.get()).second) bytes += memory->bytes();
  };
  const auto add_branch = [&](const Branch& branch) {
    for (const Point& point : branch.undo) add(point.memory);
  };
  add_branch(now_);
  for (const auto& [name, parked] : others_) {
    add_branch(parked.branch);
    add(parked.memory);
  }
  return bytes;
}

}  // namespace weft::tools
