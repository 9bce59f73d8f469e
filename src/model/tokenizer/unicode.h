// UTF-8, the classes of characters that split patterns ask for, and Unicode's normal form C.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weft::model {

enum class CharClass : uint8_t { letter, mark, number, space, other };

// \p{L}, \p{M}, \p{N} and \s, as Unicode 16 has them.
CharClass char_class(char32_t c);

inline constexpr char32_t kReplacement = 0xFFFD;

struct DecodedChar {
  char32_t value = kReplacement;  // U+FFFD for an ill-formed part
  uint32_t bytes = 1;             // of the character, or of the maximal ill-formed part
  bool well_formed = false;
  bool cut_off = false;  // ill-formed only because the text ends here
};

// The character that begins at text[at], at < text.size().
DecodedChar decode_utf8(std::string_view text, size_t at);
void append_utf8(std::string& out, char32_t c);

// Each maximal ill-formed part replaced by U+FFFD.
std::string to_well_formed(std::string_view text);

// Normal form C of a well-formed text. Linear but for sorting runs of combining marks. Marks are ordered by the Unicode version of
// libutf8proc; the `tokenizers` library leaves marks that are newer than Unicode 9 where they stand.
std::string to_nfc(std::string_view text);

}  // namespace weft::model
