// The layout of a state file: a prologue, a JSON header, and sections whose order and sizes follow from the header.
//
//   bytes 0..7    "weftstat"
//   8..11         version, u32                      all numbers little-endian
//   12..15        bytes of the header, u32
//   16..23        bytes of the file, u64
//   24..31        XXH3 of bytes 0..23 and the header
//   32..          the header, JSON, padded with spaces so that the sections begin at a multiple of 64
//   sections      each padded with zeros to a multiple of 64, with an XXH3 of its own
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

// One side (K or V) of an attention layer in the header.
struct SideHeader {
  std::string id;
  int64_t head_dim = 0, code_bytes = 0, gain_bytes = 0;  // of a row
  uint64_t format = 0;                                   // checksum of what gives codes and gains their meaning
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

  // Computes sections and file_bytes from the other members, with checksums of 0. The size of the header does not depend on
  // checksums.
  void lay_out();
  // The bytes of prologue and header.
  std::string text() const;
  // Throws Error for a header that could not be read back: strings that are not UTF-8, or too many bytes. Call it after lay_out().
  void check_texts(std::string_view name) const;
};

// The first of `ids` that is not a token of a vocabulary of vocab_size tokens (0: of any size), as "-7, wanted 0 to 4095". Nothing
// if all are tokens.
std::optional<std::string> first_invalid_token(std::span<const int32_t> ids, int64_t vocab_size);

// Bytes of prologue and header, read from the prologue. Throws weft::Error for bytes that are not the beginning of a state file.
int64_t state_header_bytes(std::span<const std::byte> prologue, std::string_view name);

// Parses the header of a file of `file_bytes` bytes. `head` is its prologue and header; further bytes are ignored. Throws
// weft::Error for anything that save_state would not write, including a file that is too short or too long. The contents of
// sections are not checked.
StateHeader parse_state_header(std::span<const std::byte> head, int64_t file_bytes, std::string_view name);

}  // namespace weft::model
