// Parses KV policies: see kv_policy.h.
#include "model/state/kv_policy.h"

#include <charconv>
#include <string>

#include "core/check.h"

namespace weft::model {
namespace {

[[noreturn]] void refuse(std::string_view part, const std::string& what) {
  throw Error(fail(Code::invalid_argument, "kv policy", "'" + std::string(part) + "'", what));
}

int64_t number(std::string_view text, std::string_view part) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    refuse(part, "has '" + std::string(text) + "' for a layer, wanted a number or a range such as 0-1");
  return value;
}

KvRecipe recipe(std::string_view name, std::string_view part, const ModelConfig& config, int64_t model_layer) {
  try {
    return kv_recipe(name, config.head_dim, config.head_dim, static_cast<uint64_t>(model_layer));
  } catch (const Error& error) {
    refuse(part, "is not a recipe for heads of size " + std::to_string(config.head_dim) + ": " + error.what());
  }
}

}  // namespace

std::vector<KvRecipe> parse_kv_policy(std::string_view text, const ModelConfig& config) {
  std::vector<int64_t> layers;  // attention layers
  for (size_t i = 0; i < config.layers.size(); ++i)
    if (config.layers[i].mixer == LayerKind::full_attention) layers.push_back(static_cast<int64_t>(i));
  const auto count = static_cast<int64_t>(layers.size());

  std::vector<KvRecipe> recipes(layers.size());
  bool first = true;
  for (std::string_view rest = text; first || !rest.empty(); first = false) {
    const size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    if (comma != std::string_view::npos && rest.empty()) refuse(text, "ends with a comma, wanted layers and a recipe after it");
    const size_t colon = part.find(':');
    int64_t begin = 0, end = count - 1;
    if (first) {
      if (colon != std::string_view::npos)
        refuse(part, "names layers, wanted a recipe for all layers first, e.g. 8v4," + std::string(part));
      recipe(part, part, config, 0);  // so that a wrong recipe is refused for a model without attention too
    } else {
      if (colon == std::string_view::npos) refuse(part, "names no layers, wanted e.g. 0-1:" + std::string(part));
      const std::string_view range = part.substr(0, colon);
      const size_t dash = range.find('-');
      begin = number(range.substr(0, dash), part);
      end = dash == std::string_view::npos ? begin : number(range.substr(dash + 1), part);
      if (begin > end || end >= count)
        refuse(part, "names layers " + std::string(range) + ", wanted a range within the " + std::to_string(count) +
                         " attention layers 0 to " + std::to_string(count - 1));
    }
    const std::string_view name = part.substr(colon == std::string_view::npos ? 0 : colon + 1);
    for (int64_t i = begin; i <= end; ++i)
      recipes[static_cast<size_t>(i)] = recipe(name, part, config, layers[static_cast<size_t>(i)]);
  }
  return recipes;
}

}  // namespace weft::model
