// Arbitrary bytes as a state file and as its header: sections that lie inside the file, or a weft::Error.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "files/checksum.h"
#include "model/state/state_header.h"
#include "weft/status.h"

namespace {

void parse(std::span<const std::byte> file) {
  try {
    const weft::model::StateHeader header = weft::model::parse_state_header(file, static_cast<int64_t>(file.size()), "file");
    int64_t end = 0;
    for (const weft::StateSection& section : header.sections) {
      if (section.offset < end || section.bytes < 0) std::abort();
      end = section.offset + section.bytes;
    }
    if (header.ids < header.tokens) std::abort();
    if (end > static_cast<int64_t>(file.size()) || header.file_bytes != static_cast<int64_t>(file.size())) std::abort();
    for (const weft::model::LayerHeader& layer : header.layers) (void)weft::model::layer_text(layer);
  } catch (const weft::Error& error) {
    if (std::string_view(error.what()).substr(0, 4) != "file") std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  parse(bytes);
  // The same bytes as a header, behind a prologue with a valid checksum.
  std::vector<std::byte> file(32 + size);
  std::memcpy(file.data(), "weftstat\1\0\0", 11);
  const auto header = static_cast<uint32_t>(size);
  const auto whole = static_cast<uint64_t>(file.size());
  std::memcpy(file.data() + 12, &header, 4);
  std::memcpy(file.data() + 16, &whole, 8);
  if (size > 0) std::memcpy(file.data() + 32, data, size);
  weft::files::Checksum sum;
  sum.add(std::span(file).first(24));
  sum.add(bytes);
  const uint64_t value = sum.value();
  std::memcpy(file.data() + 24, &value, 8);
  parse(file);
  return 0;
}
