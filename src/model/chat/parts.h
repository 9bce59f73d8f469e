// The two kinds of chat templates as data, by which ChatTemplate (weft/chat.h) renders chats.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "weft/chat.h"

namespace weft::model {

inline constexpr const char* kChatOp = "chat";
inline constexpr std::string_view kThinkOpen = "<think>", kThinkClose = "</think>";

// How assistant messages of the ChatML family are written.
enum class AssistantForm {
  verbatim,  // the content as it is
  last,      // QwQ: only the last message of the chat keeps its thinking
  query,     // Qwen3: no thinking before the last query; after it a thinking block if there is thinking or the message is the last
  always,    // Qwen3.5: no thinking before the last query; after it always a thinking block
  kept       // every message has a thinking block
};

// What the statements of a program of the ChatML family do.
struct ChatMl {
  AssistantForm assistant = AssistantForm::verbatim;
  bool trims = false;                 // contents lose white space at both ends
  bool splits = true;                 // a thinking block in the content counts as thinking where ChatMessage::thinking is absent
  bool needs_query = false;           // refuses a chat without a query of the user
  bool later_system = true;           // writes system messages after the first message; false: refuses them
  std::string default_system;         // text written where the first message is no system message; empty: none
  std::string prompt;                 // text after "<|im_start|>assistant\n" that asks for an answer, where
  std::string prompt_on, prompt_off;  // ChatRendering::thinking is absent (prompt), true (prompt_on), false (prompt_off)
};

// A template file: texts before and after messages.
struct Affixes {
  std::string before, after;
};
struct AffixTemplate {
  std::string begin;
  std::optional<Affixes> system;
  Affixes user, assistant;
  std::string next_user;    // before every user message but the first, and before `user.before`
  std::string open, close;  // markers of a thinking block; empty: the template has none
  bool opened = false;      // an answer begins inside of a thinking block
  std::vector<std::string> stops;
  bool plain = false;
};

inline constexpr uint64_t kMaxTemplateBytes = 64 << 10;

// The text of "chat_template" in tokenizer_config.json, which is a string or a list of {"name", "template"}. Throws weft::Error.
std::optional<std::string> config_template(std::string_view json, std::string_view file);
// The Jinja program of a model: chat_template.jinja or tokenizer_config.json of a folder, or the metadata of a GGUF file.
struct FoundTemplate {
  std::string program, file;
};
std::optional<FoundTemplate> find_template(const std::filesystem::path& model);
// Recognises a Jinja program of the ChatML family, or throws weft::Error.
ChatMl recognise_chatml(std::string_view jinja, std::string_view file);
// Reads the JSON of a template file.
AffixTemplate parse_affixes(std::string_view json, std::string_view file);

// Appends texts, and joins neighbours of the same kind.
class SegmentWriter {
 public:
  void control(std::string_view text) { add(text, true); }
  void content(std::string_view text) { add(text, false); }
  std::vector<ChatSegment> take() { return std::move(segments_); }

 private:
  void add(std::string_view text, bool control);
  std::vector<ChatSegment> segments_;
};

std::vector<ChatSegment> render_chatml(const ChatMl& style, std::span<const ChatMessage> messages, const ChatRendering& rendering);
std::vector<ChatSegment> render_affixes(const AffixTemplate& style, std::span<const ChatMessage> messages,
                                        const ChatRendering& rendering);

}  // namespace weft::model

namespace weft {

struct ChatTemplate::Parts {
  std::variant<model::ChatMl, model::AffixTemplate> style;
  std::vector<std::string> stops;
};

}  // namespace weft
