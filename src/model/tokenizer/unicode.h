// UTF-8, the character classes of the split patterns, and Unicode normalisation form C (NFC).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weft::model {

enum class CharClass : uint8_t { letter, mark, number, space, other };

// \p{L}, \p{M}, \p{N} and \s of Unicode 16.
CharClass char_class(char32_t c);

inline constexpr char32_t kReplacement = 0xFFFD;

struct DecodedChar {
  char32_t value = kReplacement;  // U+FFFD for an ill-formed part
  uint32_t bytes = 1;             // of the character, or of the maximal ill-formed part
  bool well_formed = false;
  bool cut_off = false;  // ill-formed only because the text ends
};

// The character that begins at text[at], at < text.size().
DecodedChar decode_utf8(std::string_view text, size_t at);
void append_utf8(std::string& out, char32_t c);

// The text with every maximal ill-formed part replaced by U+FFFD.
std::string to_well_formed(std::string_view text);

// NFC of a well-formed text. Takes linear time except for sorting runs of combining marks. Marks are ordered by the Unicode version
// of libutf8proc; the `tokenizers` library does not reorder marks newer than Unicode 9.
std::string to_nfc(std::string_view text);

}  // namespace weft::model
