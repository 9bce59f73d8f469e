// Writes chats as the programs of the ChatML family do: see parts.h.
#include <algorithm>

#include "core/check.h"
#include "files/refuse.h"
#include "model/chat/parts.h"
#include "model/tokenizer/unicode.h"

namespace weft::model {
namespace {

constexpr std::string_view kStart = "<|im_start|>", kEnd = "<|im_end|>\n";

// White space by the definition of Python's str.strip().
bool is_python_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty()) {
    const DecodedChar c = decode_utf8(text, 0);
    if (!is_python_space(c.value)) break;
    text.remove_prefix(c.bytes);
  }
  while (!text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && text.size() - begin < 4 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    const DecodedChar c = decode_utf8(text, begin);
    if (begin + c.bytes != text.size() || !is_python_space(c.value)) break;
    text.remove_suffix(text.size() - begin);
  }
  return text;
}

std::string_view without_lines(std::string_view text, bool left, bool right) {
  while (left && text.starts_with('\n')) text.remove_prefix(1);
  while (right && text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

// text.split(separator)[0] and [-1].
std::string_view before_first(std::string_view text, std::string_view separator) { return text.substr(0, text.find(separator)); }
std::string_view after_last(std::string_view text, std::string_view separator) {
  const size_t at = text.rfind(separator);
  return at == std::string_view::npos ? text : text.substr(at + separator.size());
}

class ChatMlWriter {
 public:
  ChatMlWriter(const ChatMl& style, std::span<const ChatMessage> messages) : style_(style), messages_(messages) {
    last_query_ = messages.empty() ? 0 : messages.size() - 1;
    bool found = false;
    for (size_t i = messages.size(); i-- > 0 && !found;)
      if (messages[i].role == "user" && !is_tool_response(shown(messages[i].content))) {
        last_query_ = i;
        found = true;
      }
    if (style.needs_query && !found)
      throw Error(fail(Code::invalid_argument, kChatOp, "messages", "hold no message of the user, which this template wants"));
  }

  void begin() {
    if (!style_.default_system.empty() && (messages_.empty() || messages_[0].role != "system"))
      out_.control(std::string(kStart) + "system\n" + style_.default_system + std::string(kEnd));
  }

  void message(size_t i) {
    const ChatMessage& message = messages_[i];
    if (message.role == "assistant") return assistant(i);
    if (message.role == "system" && i > 0 && !style_.later_system)
      throw Error(fail(Code::invalid_argument, kChatOp, "messages[" + std::to_string(i) + "]",
                       "is a system message, which this template allows as the first message only"));
    whole(message.role, shown(message.content));
  }

  void generation_prompt(const std::optional<bool>& thinking) {
    out_.control(std::string(kStart) + "assistant\n" +
                 (!thinking   ? style_.prompt
                  : *thinking ? style_.prompt_on
                              : style_.prompt_off));
  }

  std::vector<ChatSegment> take() { return out_.take(); }

 private:
  static bool is_tool_response(std::string_view text) {
    return text.starts_with("<tool_response>") && text.ends_with("</tool_response>");
  }
  std::string_view shown(std::string_view text) const { return style_.trims ? trimmed(text) : text; }

  void whole(const std::string& role, std::string_view content) {
    out_.control(std::string(kStart) + role + "\n");
    out_.content(content);
    out_.control(kEnd);
  }

  void with_block(std::string_view thinking, std::string_view content) {
    out_.control(std::string(kStart) + "assistant\n<think>\n");
    out_.content(thinking);
    out_.control("\n</think>\n\n");
    out_.content(content);
    out_.control(kEnd);
  }

  void assistant(size_t i) {
    const ChatMessage& message = messages_[i];
    std::string_view content = shown(message.content), thinking;
    const bool last = i + 1 == messages_.size();
    const std::string_view answer = without_lines(after_last(content, kThinkClose), true, false);
    if (style_.assistant == AssistantForm::verbatim) return whole("assistant", content);
    if (style_.assistant == AssistantForm::last) return whole("assistant", last ? content : answer);
    if (message.thinking) {
      thinking = *message.thinking;
    } else if (style_.splits && content.find(kThinkClose) != std::string_view::npos) {
      thinking = without_lines(after_last(without_lines(before_first(content, kThinkClose), false, true), kThinkOpen), true, false);
      content = answer;
    }
    const bool behind = i > last_query_;
    switch (style_.assistant) {
      case AssistantForm::query:
        if (behind && (last || !thinking.empty()))
          return with_block(without_lines(thinking, true, true), without_lines(content, true, false));
        return whole("assistant", content);
      case AssistantForm::always:
        if (behind) return with_block(trimmed(thinking), content);
        return whole("assistant", content);
      default: return with_block(trimmed(thinking), content);
    }
  }

  const ChatMl& style_;
  std::span<const ChatMessage> messages_;
  size_t last_query_ = 0;
  SegmentWriter out_;
};

}  // namespace

void SegmentWriter::add(std::string_view text, bool control) {
  if (text.empty()) return;
  if (segments_.empty() || segments_.back().control != control) segments_.push_back({"", control});
  segments_.back().text += text;
}

std::vector<ChatSegment> render_chatml(const ChatMl& style, std::span<const ChatMessage> messages, const ChatRendering& rendering) {
  ChatMlWriter writer(style, messages);
  const size_t first = std::min(rendering.first, messages.size());
  const size_t end = first + std::min(rendering.count, messages.size() - first);
  if (first == 0 && rendering.count > 0) writer.begin();
  for (size_t i = first; i < end; ++i) writer.message(i);
  if (rendering.generation_prompt && end == messages.size()) writer.generation_prompt(rendering.thinking);
  return writer.take();
}

}  // namespace weft::model
