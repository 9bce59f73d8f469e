// A reader of the safetensors format that trusts nothing it reads.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::files {

struct SafeTensor {
  std::string dtype;  // "F32", "U8", ... as the file says
  std::vector<int64_t> shape;
  std::span<const uint8_t> bytes;  // little endian, inside the file, at no particular alignment
};

struct SafeTensors {
  std::map<std::string, SafeTensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Views into `file`: 8 bytes of header length, a JSON header, the data. Throws weft::Error with a sentence that begins with `name` for
// anything that is not exactly that: lengths, offsets, shapes that overflow or disagree, names that repeat, data that overlaps or that
// no tensor owns.
SafeTensors parse_safetensors(std::span<const uint8_t> file, std::string_view name = "safetensors");

// Size of an element; 0 for a dtype that the format does not have.
int64_t safetensors_element_bytes(std::string_view dtype);

}  // namespace weft::files
