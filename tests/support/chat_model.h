// The bundled model with the tokens and the template of a chat model: its answers make no sense, but they are answers.
#pragma once

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/folder.h"

namespace weft {

// Fills a folder. The four tokens of the highest ids become <|im_start|>, <|im_end|>, <think> and </think>.
inline void make_chat_model(const std::filesystem::path& folder, const std::string& jinja) {
  namespace fs = std::filesystem;
  using nlohmann::json;
  const fs::path shipped = WEFT_SOURCE_DIR "/models/weft-11m";
  for (const auto& file : fs::directory_iterator(shipped)) {
    const std::string name = file.path().filename().string();
    if (file.path().extension() == ".safetensors" || name.ends_with("config.json") || name.ends_with(".index.json"))
      if (name != "tokenizer_config.json") fs::create_symlink(file.path(), folder / name);
  }
  json tokenizer = json::parse(text_of(shipped / "tokenizer.json"));
  json& vocabulary = tokenizer["model"]["vocab"];
  std::vector<std::string> by_id(vocabulary.size());
  for (const auto& [text, id] : vocabulary.items()) by_id.at(id.get<size_t>()) = text;
  std::vector<std::string> gone;
  for (const char* text : {"</think>", "<think>", "<|im_end|>", "<|im_start|>"}) {
    const size_t id = by_id.size() - 1 - gone.size();
    gone.push_back(by_id[id]);
    vocabulary.erase(by_id[id]);
    tokenizer["added_tokens"].push_back({{"id", id}, {"content", text}, {"special", text[1] == '|'}, {"normalized", false}});
  }
  json merges = json::array();
  for (const json& merge : tokenizer["model"]["merges"])
    if (std::find(gone.begin(), gone.end(), merge[0].get<std::string>() + merge[1].get<std::string>()) == gone.end())
      merges.push_back(merge);
  tokenizer["model"]["merges"] = merges;
  std::ofstream(folder / "tokenizer.json") << tokenizer.dump();
  if (!jinja.empty()) std::ofstream(folder / "chat_template.jinja") << jinja;
}

}  // namespace weft
