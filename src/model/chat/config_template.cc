// Finds the chat template of a model: see parts.h.
#include "files/gguf.h"
#include "files/json_walk.h"
#include "files/mapped_file.h"
#include "files/refuse.h"
#include "model/chat/parts.h"

namespace weft::model {
namespace {

using files::JsonPart;

constexpr uint64_t kMaxConfigBytes = 32 << 20;

// The text of a template of tokenizer_config.json, decoded.
std::string template_text(const JsonPart& value, std::string_view file, const char* field) {
  if (!value.is(JsonPart::Kind::string)) files::refuse(file, field, "is " + files::json_text(value) + ", wanted a string");
  // Escapes take up to six bytes a character.
  if (value.text().size() > 6 * kMaxTemplateBytes)
    files::refuse(file, field, "has " + std::to_string(value.text().size()) + " bytes, wanted at most 393216");
  return value.string();
}

}  // namespace

std::optional<std::string> config_template(std::string_view json, std::string_view file) {
  const JsonPart config = files::check_json_object(json, file);
  std::optional<JsonPart> found;
  config.members([&](std::string_view name, const JsonPart& value) {
    if (name != "chat_template") return;
    if (found) files::refuse(file, "chat_template", "is given twice");
    found = value;
  });
  if (!found || found->is(JsonPart::Kind::null)) return std::nullopt;
  if (!found->is(JsonPart::Kind::list)) return template_text(*found, file, "chat_template");
  std::optional<std::string> standard;
  found->elements([&](const JsonPart& entry) {
    if (!entry.is(JsonPart::Kind::object))
      files::refuse(file, "chat_template", "holds " + files::json_text(entry) + ", wanted objects with name and template");
    std::optional<JsonPart> text;
    bool wanted = false;
    entry.members([&](std::string_view name, const JsonPart& value) {
      if (name == "name" && value.is(JsonPart::Kind::string) && value.text() == "\"default\"") wanted = true;
      if (name == "template") text = value;
    });
    if (wanted && text) standard = template_text(*text, file, "chat_template.template");
  });
  if (!standard) files::refuse(file, "chat_template", "lists no template of the name 'default'");
  return standard;
}

std::optional<FoundTemplate> find_template(const std::filesystem::path& model) {
  if (files::is_gguf(model)) {
    const files::GgufFiles file = files::open_gguf(model);
    const std::optional<std::string_view> program = file.fields.text("tokenizer.chat_template");
    if (!program) return std::nullopt;
    return FoundTemplate{std::string(*program), model.native()};
  }
  const std::filesystem::path program = model / "chat_template.jinja", config = model / "tokenizer_config.json";
  if (files::is_there(program)) return FoundTemplate{files::read_text(program, kMaxTemplateBytes), program.native()};
  if (!files::is_there(config)) return std::nullopt;
  std::optional<std::string> found = config_template(files::read_text(config, kMaxConfigBytes), config.native());
  if (!found) return std::nullopt;
  return FoundTemplate{std::move(*found), config.native()};
}

}  // namespace weft::model
