// How byte-level vocabularies spell the bytes of tokens.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "model/tokenizer/unicode.h"

namespace weft::model {

// Byte-level vocabularies spell each byte as a printable character: printable Latin-1 characters as themselves, the 68 others as
// U+0100 and up, in order.
constexpr bool prints_as_itself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}
inline constexpr int kSpellings = 0x100 + 68;
inline constexpr std::array<int16_t, kSpellings> kByteOf = [] {
  std::array<int16_t, kSpellings> bytes{};
  bytes.fill(-1);
  size_t next = 0x100;
  for (int b = 0; b < 256; ++b) bytes[prints_as_itself(b) ? static_cast<size_t>(b) : next++] = static_cast<int16_t>(b);
  return bytes;
}();

// Appends the bytes that a token of the vocabulary spells. Returns false for a text that is not such a spelling.
inline bool unspell(std::string_view text, std::string& bytes) {
  for (size_t at = 0; at < text.size();) {
    const DecodedChar c = decode_utf8(text, at);
    if (c.value >= kSpellings || kByteOf[c.value] < 0) return false;
    bytes += static_cast<char>(kByteOf[c.value]);
    at += c.bytes;
  }
  return true;
}

}  // namespace weft::model
