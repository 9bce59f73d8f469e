// Template files: the texts before and after messages, for families that Weft does not know. docs/chat.md describes them.
#include <algorithm>

#include "core/check.h"
#include "files/json_text.h"
#include "files/refuse.h"
#include "model/chat/parts.h"

namespace weft::model {
namespace {

using files::Json;
using files::JsonFields;

void refuse_others(const Json& object, const std::string& file, const std::string& path, std::initializer_list<const char*> known) {
  for (const auto& [name, value] : object.items())
    if (std::find(known.begin(), known.end(), name) == known.end())
      files::refuse(file, path + name, "is not a field of a template file");
}

Affixes read_affixes(const Json& object, const JsonFields& fields, const std::string& name) {
  refuse_others(object, fields.file(), name + ".", {"before", "after"});
  return {fields.text("before").value_or(""), fields.text("after").value_or("")};
}

}  // namespace

AffixTemplate parse_affixes(std::string_view json, std::string_view file) {
  const std::string name(file);
  const Json root = files::parse_json_object(json, name);
  const JsonFields fields(root, name);
  refuse_others(root, name, "", {"begin", "system", "user", "assistant", "thinking", "stop"});
  AffixTemplate style;
  style.begin = fields.text("begin").value_or("");
  const auto affixes = [&](const char* role) -> std::optional<Affixes> {
    if (const std::optional<JsonFields> object = fields.object(role)) return read_affixes(root.at(role), *object, role);
    return std::nullopt;
  };
  const auto required = [&](const char* role) {
    if (std::optional<Affixes> found = affixes(role)) return *std::move(found);
    fields.fail(role, "is missing, wanted an object with \"before\" and \"after\"");
  };
  style.system = affixes("system");
  style.user = required("user");
  style.assistant = required("assistant");
  if (const std::optional<JsonFields> thinking = fields.object("thinking")) {
    refuse_others(root.at("thinking"), name, "thinking.", {"open", "close", "opened"});
    style.open = thinking->text("open").value_or("");
    style.close = thinking->text("close").value_or("");
    style.opened = thinking->flag("opened").value_or(false);
    if (style.open.empty() || style.close.empty())
      fields.fail("thinking", "lacks \"open\" or \"close\", wanted the texts around thinking");
  }
  if (const Json* stops = fields.array("stop")) {
    constexpr size_t kMostStops = 16;
    if (stops->size() > kMostStops) fields.fail("stop", "has " + std::to_string(stops->size()) + " texts, wanted at most 16");
    for (const Json& stop : *stops) {
      if (!stop.is_string() || stop.get_ref<const std::string&>().empty())
        fields.fail("stop", "holds " + files::json_text(stop) + ", wanted texts that are not empty");
      style.stops.push_back(stop.get<std::string>());
    }
  }
  return style;
}

std::vector<ChatSegment> render_affixes(const AffixTemplate& style, std::span<const ChatMessage> messages,
                                        const ChatRendering& rendering) {
  SegmentWriter out;
  const size_t first = std::min(rendering.first, messages.size());
  const size_t end = first + std::min(rendering.count, messages.size() - first);
  if (first == 0 && rendering.count > 0) out.control(style.begin);
  for (size_t i = first; i < end; ++i) {
    const ChatMessage& message = messages[i];
    const bool system = message.role == "system", user = message.role == "user";
    if (system && (!style.system || i > 0))
      throw Error(fail(Code::invalid_argument, kChatOp, "messages[" + std::to_string(i) + "]",
                       style.system ? "is a system message, which this template allows as the first message only"
                                    : "is a system message, which this template does not have"));
    const Affixes& around = system ? *style.system : user ? style.user : style.assistant;
    std::string_view content = message.content;
    if (!system && !user && !style.close.empty())
      if (const size_t at = content.rfind(style.close); at != std::string_view::npos) {
        content.remove_prefix(at + style.close.size());
        content.remove_prefix(std::min(content.find_first_not_of('\n'), content.size()));
      }
    if (user && i > 0) out.control(style.next_user);
    out.control(around.before);
    out.content(content);
    out.control(around.after);
  }
  if (rendering.generation_prompt && end == messages.size()) out.control(style.assistant.before);
  return out.take();
}

}  // namespace weft::model
