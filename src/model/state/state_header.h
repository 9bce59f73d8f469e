// The layout of a state file: a prologue, a header of JSON, and sections whose order and sizes follow from the header.
//
//   bytes 0..7    "weftstat"
//   8..11         version, u32                      all numbers little-endian
//   12..15        bytes of the header, u32
//   16..23        bytes of the file, u64
//   24..31        XXH3 of bytes 0..23 and the header
//   32..          the header, JSON, filled up with spaces so that sections begin at a multiple of 64
//   sections      each filled up with zeros to a multiple of 64, under its own XXH3
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/state_file.h"

namespace weft::model {

inline constexpr uint32_t kStateVersion = 1;
inline constexpr int64_t kPrologueBytes = 32, kSectionAlignment = 64;

inline int64_t padded(int64_t bytes) { return (bytes + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment; }

// One side of an attention layer as files know it.
struct SideHeader {
  std::string id;
  int64_t head_dim = 0, code_bytes = 0, gain_bytes = 0;  // of a row
  uint64_t format = 0;                                   // checksum of everything that gives codes and gains their meaning
  friend bool operator==(const SideHeader&, const SideHeader&) = default;
};

struct LayerHeader {
  bool delta = false;
  int64_t value_heads = 0, value_dim = 0, key_dim = 0, channels = 0, width = 0;  // delta
  int64_t kv_heads = 0;                                                          // attention
  SideHeader k, v;
  friend bool operator==(const LayerHeader&, const LayerHeader&) = default;
};

LayerHeader layer_header(const LayerMemory& layer);
// "gated delta, 4 value heads of 128 x 128, convolution of 1024 channels x 4"
std::string layer_text(const LayerHeader& layer);

struct StateHeader {
  std::string fingerprint, model, kv;
  int64_t tokens = 0, ids = 0;
  std::vector<LayerHeader> layers;
  std::vector<StateSection> sections;  // offsets from the beginning of the file
  int64_t file_bytes = 0;

  // Fills in sections and file_bytes, with checksums of 0, from the members before. The size of the header's text does not depend on
  // checksums.
  void lay_out();
  // Prologue and header.
  std::string text() const;
  // Refuses what would not come back as it is: texts that are no UTF-8, and more of them than a header holds. After lay_out().
  void check_texts(std::string_view name) const;
};

// "-7, wanted 0 to 4095": the first of `ids` that is no token of a vocabulary of so many (0: of any size); nothing when all are.
std::optional<std::string> no_token(std::span<const int32_t> ids, int64_t vocab_size);

// Bytes of prologue and header, from the prologue. Throws weft::Error with a sentence for bytes that do not begin a state file.
int64_t state_header_bytes(std::span<const std::byte> prologue, std::string_view name);

// The header of a file of `file_bytes` bytes that begins with `head`: prologue and header, more is not looked at. Throws weft::Error with a
// sentence for anything that is not as save_state writes it, a file that is too short or too long included. Sections are not checked.
StateHeader parse_state_header(std::span<const std::byte> head, int64_t file_bytes, std::string_view name);

}  // namespace weft::model
