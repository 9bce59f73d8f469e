// First mistakes with --model: see model_path.h.
#include "tools/model_path.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace weft::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWanted = "a folder with config.json, *.safetensors and tokenizer.json, or a GGUF file";

// The first bytes of a regular file; empty for anything else.
std::string beginning_of(const fs::path& path) {
  constexpr std::streamsize kEnough = 64;
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return "";
  std::ifstream in(path, std::ios::binary);
  std::string text(kEnough, '\0');
  in.read(text.data(), kEnough);
  text.resize(static_cast<size_t>(in.gcount()));
  return text;
}

bool is_gguf(const fs::path& path) { return path.extension() == ".gguf" || beginning_of(path).starts_with("GGUF"); }

// Two words with a slash between them, as a hub writes names: Qwen/Qwen3.5-0.8B.
bool is_hub_name(std::string_view path) {
  const size_t slash = path.find('/');
  const auto is_word = [](std::string_view word) {
    return !word.empty() && word[0] != '.' && word[0] != '~' && std::all_of(word.begin(), word.end(), [](unsigned char c) {
      return std::isalnum(c) || c == '-' || c == '_' || c == '.';
    });
  };
  return slash != std::string_view::npos && is_word(path.substr(0, slash)) && is_word(path.substr(slash + 1));
}

}  // namespace

void check_model_path(const std::string& path) {
  std::error_code ignored;
  const fs::file_status found = fs::status(path, ignored);
  if (!fs::exists(found)) {
    constexpr std::string_view kHub = "https://huggingface.co/";
    const std::string name = path.starts_with(kHub) ? path.substr(kHub.size()) : path;
    if (is_hub_name(name)) {
      const std::string folder = name.substr(name.find('/') + 1);
      throw std::runtime_error(
          fmt::format("{}: there is no such folder. If this is a name on the Hugging Face hub, download it first (Weft downloads "
                      "nothing): hf download {} --local-dir {}, then --model {}",
                      path, name, folder, folder));
    }
    throw std::runtime_error(fmt::format("{}: there is no such folder, wanted {}", path, kWanted));
  }
  if (!fs::is_directory(found)) {
    if (is_gguf(path)) return;
    const fs::path parent = fs::path(path).parent_path(), folder = parent.empty() ? "." : parent;
    throw std::runtime_error(
        fmt::format("{}: is a file, wanted {}{}", path, kWanted,
                    fs::exists(folder / "config.json", ignored) ? fmt::format("; did you mean --model {}?", folder.string()) : ""));
  }
  // Entries in order of their names, so that the same mistake gives the same sentence.
  constexpr size_t kMostEntries = 10000;
  std::vector<fs::path> files;
  for (fs::directory_iterator at(path, ignored), end; !ignored && at != end && files.size() < kMostEntries; at.increment(ignored))
    files.push_back(at->path());
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    const std::string name = file.filename().string();  // other files may be pointers on purpose, such as consolidated.safetensors
    const bool read = (file.extension() == ".safetensors" && name.starts_with("model")) || name == "config.json" ||
                      name == "tokenizer.json" || name == "model.safetensors.index.json";
    if (read && beginning_of(file).starts_with("version https://git-lfs.github.com/spec/"))
      throw std::runtime_error(fmt::format(
          "{}: is a Git LFS pointer, not the file itself; fetch the files with: git -C {} lfs pull", file.string(), path));
  }
  if (fs::exists(fs::path(path) / "config.json", ignored)) return;
  for (const fs::path& file : files)
    if (is_gguf(file))
      throw std::runtime_error(
          fmt::format("{}: this folder has no config.json, but a GGUF file; name the file: --model {}", path, file.string()));
}

}  // namespace weft::tools
