// Chat templates behind their public functions: see weft/chat.h.
#include <algorithm>

#include "core/check.h"
#include "files/mapped_file.h"
#include "files/refuse.h"
#include "model/chat/parts.h"
#include "model/parts.h"

namespace weft {
namespace {

using model::AffixTemplate;
using model::ChatMl;

using model::kMaxTemplateBytes;

void check_messages(std::span<const ChatMessage> messages) {
  for (size_t i = 0; i < messages.size(); ++i)
    if (messages[i].role != "system" && messages[i].role != "user" && messages[i].role != "assistant")
      throw Error(fail(Code::invalid_argument, model::kChatOp, "messages[" + std::to_string(i) + "].role",
                       "is " + files::in_quotes(messages[i].role) + ", wanted system, user or assistant"));
}

}  // namespace

ChatTemplate::ChatTemplate(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}
ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(const ChatTemplate&) = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(const ChatTemplate&) = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::optional<ChatTemplate> ChatTemplate::load(const std::filesystem::path& path) {
  const std::optional<model::FoundTemplate> found = model::find_template(path);
  if (!found) return std::nullopt;
  return recognise(found->program, found->file);
}

ChatTemplate ChatTemplate::recognise(std::string_view jinja, std::string_view file) {
  if (jinja.size() > kMaxTemplateBytes)
    files::refuse(file, "chat_template",
                  "has " + std::to_string(jinja.size()) + " bytes, wanted at most " + std::to_string(kMaxTemplateBytes));
  return ChatTemplate(std::make_shared<const Parts>(Parts{model::recognise_chatml(jinja, file), {"<|im_end|>"}}));
}

ChatTemplate ChatTemplate::read(const std::filesystem::path& file) {
  return parse(files::read_text(file, kMaxTemplateBytes), file.native());
}

ChatTemplate ChatTemplate::parse(std::string_view json, std::string_view file) {
  if (json.size() > kMaxTemplateBytes)
    files::refuse(file, "", "has " + std::to_string(json.size()) + " bytes, wanted at most " + std::to_string(kMaxTemplateBytes));
  AffixTemplate style = model::parse_affixes(json, file);
  std::vector<std::string> stops = style.stops;
  return ChatTemplate(std::make_shared<const Parts>(Parts{std::move(style), std::move(stops)}));
}

ChatTemplate ChatTemplate::plain() {
  AffixTemplate style;
  style.next_user = "\n";
  style.plain = true;
  return ChatTemplate(std::make_shared<const Parts>(Parts{std::move(style), {}}));
}

std::string ChatTemplate::summary() const {
  if (is_plain()) return "no template";
  const auto* chatml = std::get_if<ChatMl>(&parts_->style);
  std::string text = chatml ? "ChatML" : "template file";
  if (!may_think()) return text;
  text += filter().thinking() ? ", thinks before it answers" : ", may think before it answers";
  const bool kept = chatml && chatml->assistant == model::AssistantForm::kept;
  return text + (kept ? ", keeps old thinking" : ", drops old thinking");
}

bool ChatTemplate::is_plain() const {
  const auto* affixes = std::get_if<AffixTemplate>(&parts_->style);
  return affixes && affixes->plain;
}

bool ChatTemplate::has_system() const {
  const auto* affixes = std::get_if<AffixTemplate>(&parts_->style);
  return !affixes || affixes->system;
}

bool ChatTemplate::may_think() const {
  if (const auto* affixes = std::get_if<AffixTemplate>(&parts_->style)) return !affixes->close.empty();
  return std::get<ChatMl>(parts_->style).assistant != model::AssistantForm::verbatim;
}

bool ChatTemplate::has_thinking_switch() const {
  const auto* chatml = std::get_if<ChatMl>(&parts_->style);
  return chatml && chatml->prompt_on != chatml->prompt_off;
}

std::vector<ChatSegment> ChatTemplate::render(std::span<const ChatMessage> messages, const ChatRendering& rendering) const {
  check_messages(messages);
  if (rendering.thinking && !has_thinking_switch())
    throw Error(fail(Code::invalid_argument, model::kChatOp, "thinking", "is given, and this template has no switch for it"));
  if (const auto* chatml = std::get_if<ChatMl>(&parts_->style)) return model::render_chatml(*chatml, messages, rendering);
  return model::render_affixes(std::get<AffixTemplate>(parts_->style), messages, rendering);
}

const std::vector<std::string>& ChatTemplate::stops() const { return parts_->stops; }

void ChatTemplate::add_stops(const Model& model, GenerateOptions& options) const {
  const auto& tokenizer = model::parts_of(model).tokenizer;
  for (const std::string& stop : stops()) {
    // An ordinary token may be a part of others: "," of ",\n". A special one never is.
    const std::optional<int32_t> token = tokenizer ? tokenizer->token_id(stop) : std::nullopt;
    if (token && tokenizer->is_special(*token))
      options.stop_tokens.push_back(*token);
    else
      options.stop_strings.push_back(stop);
  }
}

ThinkingFilter ChatTemplate::filter(std::optional<bool> thinking) const {
  if (const auto* affixes = std::get_if<AffixTemplate>(&parts_->style)) return {affixes->open, affixes->close, affixes->opened};
  const auto& chatml = std::get<ChatMl>(parts_->style);
  if (!may_think()) return {"", "", false};
  const std::string& prompt = !thinking ? chatml.prompt : *thinking ? chatml.prompt_on : chatml.prompt_off;
  const bool opened = prompt.find(model::kThinkOpen) != std::string::npos && prompt.find(model::kThinkClose) == std::string::npos;
  return {std::string(model::kThinkOpen), std::string(model::kThinkClose), opened};
}

std::string chat_text(std::span<const ChatSegment> segments) {
  std::string text;
  for (const ChatSegment& segment : segments) text += segment.text;
  return text;
}

std::vector<int32_t> encode_chat(const Model& model, std::span<const ChatSegment> segments) {
  return *encode_chat(model, segments, SIZE_MAX);
}

std::optional<std::vector<int32_t>> encode_chat(const Model& model, std::span<const ChatSegment> segments, size_t most) {
  const auto& tokenizer = model::parts_of(model).tokenizer;
  if (!tokenizer) throw Error(fail(Code::invalid_argument, model::kChatOp, "model", "has no tokenizer, so texts cannot be read"));
  std::vector<model::TextPart> parts;
  for (const ChatSegment& segment : segments) parts.push_back({segment.text, segment.control});
  return tokenizer->encode(parts, most);
}

}  // namespace weft
