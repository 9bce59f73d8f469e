// Opens a GGUF file with all its parts: see gguf.h.
#include <cstdio>

#include "files/gguf.h"
#include "files/refuse.h"

namespace weft::files {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostParts = 4096;

// "-00001-of-00003.gguf"
std::string ending_of(int64_t part, int64_t parts) {
  char text[48];
  std::snprintf(text, sizeof text, "-%05d-of-%05d.gguf", static_cast<int>(part + 1), static_cast<int>(parts));
  return text;
}

// The name of part `part`, made from the name of the first part.
fs::path name_of(const fs::path& first, int64_t part, int64_t parts) {
  std::string name = first.filename().string();
  name.resize(name.size() - ending_of(0, parts).size());
  return first.parent_path() / (name + ending_of(part, parts));
}

void move_tensors(Gguf& from, GgufFiles& to) {
  while (!from.tensors.empty()) {
    auto node = from.tensors.extract(from.tensors.begin());
    const std::string_view name = node.key();
    if (!to.tensors.insert(std::move(node)).inserted)
      refuse(from.fields.file(), "tensor " + std::string(name), "is in another part too");
    if (to.tensors.size() > kMaxGgufTensors)
      refuse(from.fields.file(), "",
             "and the parts before it have more than " + std::to_string(kMaxGgufTensors) + " tensors, wanted at most that many");
  }
}

}  // namespace

GgufFiles open_gguf(const fs::path& path) {
  GgufFiles all;
  all.files.emplace_back(path);
  Gguf first = parse_gguf(all.files.back().bytes(), path.native());
  const int64_t parts = first.fields.whole("split.count", 0, kMostParts).value_or(1);
  const int64_t part = first.fields.whole("split.no", 0, kMostParts).value_or(0);
  if (parts > 1 && part >= parts)
    first.fields.fail("split.no", "is " + std::to_string(part) + ", wanted less than split.count = " + std::to_string(parts));
  if (parts > 1 && !path.filename().string().ends_with(ending_of(part, parts)))
    refuse(path.native(), "",
           "is part " + std::to_string(part + 1) + " of " + std::to_string(parts) + ", wanted a name that ends in " +
               ending_of(part, parts) + ", by which the other parts are found");
  if (parts > 1 && part > 0) {
    std::string name = path.filename().string();
    name.resize(name.size() - ending_of(part, parts).size());
    refuse(path.native(), "",
           "is part " + std::to_string(part + 1) + " of " + std::to_string(parts) + ", wanted the first one, " + name +
               ending_of(0, parts));
  }
  const std::optional<int64_t> wanted = first.fields.whole("split.tensors.count", 0, kMaxGgufTensors);
  move_tensors(first, all);
  all.fields = std::move(first.fields);
  for (int64_t next = 1; next < parts; ++next) {
    const fs::path file = name_of(path, next, parts);
    all.files.emplace_back(file);
    Gguf more = parse_gguf(all.files.back().bytes(), file.native());
    if (const auto number = more.fields.whole("split.no", 0, kMostParts); number != next)
      more.fields.fail("split.no",
                       (number ? "is " + std::to_string(*number) : std::string("is missing")) + ", wanted " + std::to_string(next));
    if (const auto count = more.fields.whole("split.count", 0, kMostParts); count != parts)
      more.fields.fail("split.count", (count ? "is " + std::to_string(*count) : std::string("is missing")) + ", wanted " +
                                          std::to_string(parts) + " as in the first part");
    move_tensors(more, all);
  }
  if (parts > 1 && wanted && *wanted != static_cast<int64_t>(all.tensors.size()))
    all.fields.fail("split.tensors.count",
                    "is " + std::to_string(*wanted) + ", and the parts have " + std::to_string(all.tensors.size()) + " tensors");
  return all;
}

}  // namespace weft::files
