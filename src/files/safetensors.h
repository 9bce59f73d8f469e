// A reader of the safetensors format for untrusted files.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::files {

struct SafeTensor {
  std::string_view dtype;  // "F32", "U8", ...: a constant
  std::vector<int64_t> shape;
  std::span<const uint8_t> bytes;  // little-endian, a view of the file, unaligned
};

struct SafeTensors {
  std::map<std::string, SafeTensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Parses a file: 8 bytes of header length, a JSON header, the data. The result has views of `file`. Throws weft::Error, whose
// message begins with `name`, for lengths, offsets and shapes that overflow or disagree, repeated names, data that overlaps or
// that no tensor owns, and for more tensors than kMaxTensors or sizes than kMaxTensorSizes. These limits bound the memory of the
// result by 64 MB plus 4 times the bytes of the file.
inline constexpr size_t kMaxTensors = 1 << 18, kMaxTensorSizes = 8;
SafeTensors parse_safetensors(std::span<const uint8_t> file, std::string_view name = "safetensors");

// Bytes of an element; 0 for a dtype that the format does not have.
int64_t safetensors_element_bytes(std::string_view dtype);

}  // namespace weft::files
