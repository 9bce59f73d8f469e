// Arbitrary bytes as the files of `weft diff`: a comparison, or a message that refuses them.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "tools/command.h"

namespace {

// A file in memory that the command can open by name.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size) : descriptor_(memfd_create("report", 0)) {
    if (descriptor_ < 0 || write(descriptor_, data, size) != static_cast<ssize_t>(size)) std::abort();
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string name() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  if (!std::freopen("/dev/null", "w", stdout)) std::abort();  // the tables of the comparisons
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The first byte cuts the rest into two files. With 0 both files are the same, so that they can be compared.
  if (size == 0) return 0;
  const size_t cut = data[0] == 0 ? size - 1 : (size - 1) * data[0] / 255;
  const MemoryFile before(data + 1, cut);
  const MemoryFile after(data[0] == 0 ? data + 1 : data + 1 + cut, data[0] == 0 ? cut : size - 1 - cut);
  CLI::App app;
  int exit = 0;
  weft::tools::add_diff(app, exit);
  try {
    app.parse("diff " + before.name() + " " + after.name());
    if (exit != weft::tools::kOk && exit != weft::tools::kFailed) std::abort();
  } catch (const std::runtime_error&) {  // the message; errors of the JSON library are of another type and end the run
  }
  return 0;
}
