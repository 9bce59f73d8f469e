// Arbitrary bytes as a checkpoint index and, after a byte 0xFF, the shard "s.safetensors": readable tensors, or a weft::Error.
#include "model/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "weft/status.h"

namespace {

// A folder that is removed when the process ends.
struct Folder {
  Folder() {
    path = (std::filesystem::temp_directory_path() / "weft-fuzz-XXXXXX").string();
    if (!::mkdtemp(path.data())) std::abort();
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

const std::string& folder() {
  static const Folder one;
  return one.path;
}

void write_file(const char* name, std::string_view bytes) {
  const int file = ::open((folder() + "/" + name).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (file < 0 || ::write(file, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
  ::close(file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  const size_t cut = std::min(all.find('\xFF'), size);
  write_file("model.safetensors.index.json", all.substr(0, cut));
  write_file("s.safetensors", cut == size ? "" : all.substr(cut + 1));
  try {
    const weft::model::Checkpoint checkpoint = weft::model::Checkpoint::open(folder());
    int64_t total = 0;
    unsigned sum = 0;
    for (const auto& [name, tensor] : checkpoint.tensors()) {
      for (int64_t i = 0; i < tensor.bytes; ++i) sum += static_cast<const uint8_t*>(tensor.data)[i];
      if (tensor.dtype && tensor.bytes != tensor.elements() * weft::dtype_bytes(*tensor.dtype)) std::abort();
      total += tensor.bytes;
    }
    if (total != checkpoint.bytes() || static_cast<size_t>(total) > size || sum > 255u * total) std::abort();
  } catch (const weft::Error& error) {
    if (std::string_view(error.what()).substr(0, folder().size()) != folder()) std::abort();
  }
  return 0;
}
