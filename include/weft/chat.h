// Chats: from messages to the tokens that a chat model expects, and from streamed text to thinking and answer.
//
//   std::optional<weft::ChatTemplate> chat = weft::ChatTemplate::load("models/Qwen3.5-4B");
//   std::vector<weft::ChatMessage> messages = {{.role = "user", .content = "Name a colour."}};
//   std::vector<int32_t> tokens = weft::encode_chat(model, chat->render(messages));
//   weft::GenerateOptions options = weft::suggested_options(model);
//   chat->add_stops(model, options);
//   weft::ThinkingFilter filter = chat->filter();
//   weft::Generator(model, options).run(state, tokens, [&](const weft::GeneratedToken& next) {
//     std::cout << filter.push(next.text).answer << std::flush;
//     return true;
//   });
//   std::cout << filter.finish().answer;
//
// Templates. A model of Hugging Face carries its template as a Jinja program. Weft runs no Jinja: it recognises the programs of the
// ChatML family (Qwen2.5, QwQ, Qwen3, Qwen3-Next, Qwen3.5, Qwen3.6) and renders as they do. Recognition is strict. Every statement
// of the program outside of the branches for tools and media must be one that Weft knows; any other program is refused by a
// sentence. A template file (ChatTemplate::read) describes other families by the texts before and after each message.
//
// Difference from transformers. The text of render() is that of apply_chat_template, without tools and media. The tokens are the
// same too, unless a message contains the text of an added token ("<|im_end|>", "<think>"): encode_chat() then encodes that text as
// ordinary characters, where transformers encodes it as the token. So the content of a message can neither end the message nor begin
// another one.
//
// Link with weft_model. Every function throws weft::Error with a sentence (operator "chat").
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/generate.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

struct ChatMessage {
  std::string role;     // "system", "user" or "assistant"
  std::string content;  // UTF-8
  // The thinking of an assistant, "reasoning_content" in transformers. Absent: a template that knows thinking looks for a block
  // "<think>...</think>" in the content.
  std::optional<std::string> thinking = {};
};

// A part of a rendered chat.
struct ChatSegment {
  std::string text;
  bool control = false;  // written by the template: texts of added tokens become these tokens
};

struct ChatRendering {
  // Renders messages [first, first + count) only. The other messages still decide how: a template that drops old thinking drops the
  // thinking of every assistant message before the last user message. The rendering of messages up to a user message is the beginning
  // of every rendering with more messages.
  size_t first = 0, count = SIZE_MAX;
  bool generation_prompt = true;  // at the end, the text that lets the model answer; only where the last message is rendered
  // enable_thinking of transformers. Absent: the template's default.
  std::optional<bool> thinking = {};
};

// Splits a streamed answer into thinking and answer. The markers themselves, and line feeds beside them, belong to neither.
class ThinkingFilter {
 public:
  struct Pieces {
    std::string thinking, answer;
  };
  // `opened`: the text begins inside of a block. Without an `open` marker all text is answer.
  ThinkingFilter(std::string open, std::string close, bool opened);

  // Takes more text and returns the text whose kind is certain. Text that could become part of a marker is held back.
  Pieces push(std::string_view text);
  Pieces finish();  // the text that was held back, at the end of the answer
  bool thinking() const { return thinking_; }

 private:
  Pieces take(bool all);

  std::string open_, close_, held_;
  bool thinking_ = false, thought_ = false, trims_ = false, any_answer_ = false;
};

// How a model wants chats written. Immutable: several threads may call any member at the same time.
class ChatTemplate {
 public:
  // The template of a model folder: chat_template.jinja, or else "chat_template" of tokenizer_config.json (of several, the one named
  // "default"). Or that of a GGUF file. Absent where the model has none. Throws Error for a template of another family and for malformed files. Reading
  // takes at most 64 MB plus four times the bytes of a file.
  static std::optional<ChatTemplate> load(const std::filesystem::path& path);
  // Recognises a Jinja program. `file` is its name in messages.
  static ChatTemplate recognise(std::string_view jinja, std::string_view file);
  // Read a template file, the JSON of docs/chat.md: by its name, and from its text.
  static ChatTemplate read(const std::filesystem::path& file);
  static ChatTemplate parse(std::string_view json, std::string_view file);
  // For models that cannot chat: contents of messages, each on a line of its own, without a system message.
  static ChatTemplate plain();

  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&);
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(const ChatTemplate&);
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  std::string summary() const;       // "ChatML, opens a thinking block, drops old thinking"
  bool is_plain() const;             // plain()
  bool has_system() const;           // may the first message be of the role "system"?
  bool may_think() const;            // are there thinking blocks?
  bool has_thinking_switch() const;  // does ChatRendering::thinking change anything?

  // Throws Error for a role that is none of the three, or that the template refuses at its place, and for `thinking` without a
  // switch. Neighbouring segments differ in `control`.
  std::vector<ChatSegment> render(std::span<const ChatMessage> messages, const ChatRendering& rendering = {}) const;

  // Texts that end an answer: "<|im_end|>".
  const std::vector<std::string>& stops() const;
  // Adds stops() to the options: as stop tokens where they are special tokens of the model, else as stop strings.
  void add_stops(const Model& model, GenerateOptions& options) const;

  // For the text of an answer after render() with this `thinking`.
  ThinkingFilter filter(std::optional<bool> thinking = {}) const;

  struct Parts;  // opaque: src/model/chat/parts.h

 private:
  explicit ChatTemplate(std::shared_ptr<const Parts> parts);
  std::shared_ptr<const Parts> parts_;
};

// The texts of segments, one after another: what apply_chat_template returns with tokenize=False.
std::string chat_text(std::span<const ChatSegment> segments);

// The tokens of segments. Texts of added tokens become tokens in control segments only. The text between added tokens is encoded as
// one text across segments, so its tokens are those of the whole text.
std::vector<int32_t> encode_chat(const Model& model, std::span<const ChatSegment> segments);
// The same where there are at most `most` tokens; absent where there are more, which is found without encoding everything.
std::optional<std::vector<int32_t>> encode_chat(const Model& model, std::span<const ChatSegment> segments, size_t most);

}  // namespace weft
#pragma GCC visibility pop
