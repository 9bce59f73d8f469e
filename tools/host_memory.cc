// How much memory this process can still allocate: see host_memory.h.
#include "tools/host_memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace weft::tools {
namespace {

namespace fs = std::filesystem;

// The number after a key, in a file with a key and a number on every line.
std::optional<int64_t> value_of(const fs::path& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

// The number that a file holds; absent where it holds a word such as "max".
std::optional<int64_t> number_in_file(const fs::path& file) {
  std::ifstream in(file);
  int64_t value = 0;
  if (in >> value) return value;
  return std::nullopt;
}

// File names in one version of control groups. The usage that they report includes cached pages of files, which the system drops
// when memory is short.
struct GroupFiles {
  const char *root, *most, *used, *cached[2];
};
constexpr GroupFiles kUnified{"/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file", "active_file"}};
constexpr GroupFiles kMemoryController{
    "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};

std::optional<int64_t> left_in_group(const GroupFiles& files, const fs::path& folder) {
  const auto most = number_in_file(folder / files.most), used = number_in_file(folder / files.used);
  if (!most || !used) return std::nullopt;
  int64_t cached = 0;
  for (const char* key : files.cached) cached += value_of(folder / "memory.stat", key).value_or(0);
  return std::max<int64_t>(0, *most - *used + std::min(*used, cached));
}

// Lines of /proc/self/cgroup are "number:controllers:/path". The limits of all parent groups apply to a group, too.
void lower_to_groups(int64_t& available) {
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const GroupFiles& files = controllers.empty() ? kUnified : kMemoryController;
    for (fs::path path = fs::path(line.substr(second + 1)).relative_path();; path = path.parent_path()) {
      if (const auto left = left_in_group(files, files.root / path)) available = std::min(available, *left);
      if (path.empty()) break;
    }
  }
}

std::optional<int64_t> limit;  // the value of --memory, set once before a command runs

}  // namespace

void limit_memory(int64_t bytes) { limit = bytes; }
std::optional<int64_t> memory_limit() { return limit; }

std::optional<int64_t> available_memory() {
  const auto kilobytes = value_of("/proc/meminfo", "MemAvailable:");
  if (!kilobytes && !limit) return std::nullopt;
  int64_t available = std::numeric_limits<int64_t>::max();
  if (kilobytes) {
    available = *kilobytes * 1024;
    lower_to_groups(available);
  }
  if (limit)
    available = std::min(available, std::max<int64_t>(0, *limit - value_of("/proc/self/status", "RssAnon:").value_or(0) * 1024));
  return available;
}

}  // namespace weft::tools
