// UTF-8, character classes and NFC: see unicode.h.
#include "model/tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "weft/status.h"

namespace weft::model {
namespace {

// Letters, marks and numbers that are new in Unicode 15.1 and 16.0. libutf8proc of Debian 12 has 15.0 and calls them unassigned.
// The table is used only for characters that libutf8proc calls unassigned.
struct LaterRange {
  char32_t first, last;
  CharClass kind;
};
constexpr LaterRange kLater[] = {
    {0x897, 0x897, CharClass::mark},       {0x1C89, 0x1C8A, CharClass::letter},   {0xA7CB, 0xA7CD, CharClass::letter},
    {0xA7DA, 0xA7DC, CharClass::letter},   {0x105C0, 0x105F3, CharClass::letter}, {0x10D40, 0x10D49, CharClass::number},
    {0x10D4A, 0x10D65, CharClass::letter}, {0x10D69, 0x10D6D, CharClass::mark},   {0x10D6F, 0x10D85, CharClass::letter},
    {0x10EC2, 0x10EC4, CharClass::letter}, {0x10EFC, 0x10EFC, CharClass::mark},   {0x11380, 0x11389, CharClass::letter},
    {0x1138B, 0x1138B, CharClass::letter}, {0x1138E, 0x1138E, CharClass::letter}, {0x11390, 0x113B5, CharClass::letter},
    {0x113B7, 0x113B7, CharClass::letter}, {0x113B8, 0x113C0, CharClass::mark},   {0x113C2, 0x113C2, CharClass::mark},
    {0x113C5, 0x113C5, CharClass::mark},   {0x113C7, 0x113CA, CharClass::mark},   {0x113CC, 0x113D0, CharClass::mark},
    {0x113D1, 0x113D1, CharClass::letter}, {0x113D2, 0x113D2, CharClass::mark},   {0x113D3, 0x113D3, CharClass::letter},
    {0x113E1, 0x113E2, CharClass::mark},   {0x116D0, 0x116E3, CharClass::number}, {0x11BC0, 0x11BE0, CharClass::letter},
    {0x11BF0, 0x11BF9, CharClass::number}, {0x11F5A, 0x11F5A, CharClass::mark},   {0x13460, 0x143FA, CharClass::letter},
    {0x16100, 0x1611D, CharClass::letter}, {0x1611E, 0x1612F, CharClass::mark},   {0x16130, 0x16139, CharClass::number},
    {0x16D40, 0x16D6C, CharClass::letter}, {0x16D70, 0x16D79, CharClass::number}, {0x18CFF, 0x18CFF, CharClass::letter},
    {0x1CCF0, 0x1CCF9, CharClass::number}, {0x1E5D0, 0x1E5ED, CharClass::letter}, {0x1E5EE, 0x1E5EF, CharClass::mark},
    {0x1E5F0, 0x1E5F0, CharClass::letter}, {0x1E5F1, 0x1E5FA, CharClass::number}, {0x2EBF0, 0x2EE5D, CharClass::letter},
};

CharClass later_class(char32_t c) {
  const LaterRange* range =
      std::lower_bound(std::begin(kLater), std::end(kLater), c, [](const LaterRange& r, char32_t value) { return r.last < value; });
  return range != std::end(kLater) && range->first <= c ? range->kind : CharClass::other;
}

bool is_space(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Is the second byte legal after the first? Excludes overlong forms, surrogates and values beyond U+10FFFF.
bool second_fits(unsigned char first, unsigned char second) {
  if (first == 0xE0) return second >= 0xA0 && second <= 0xBF;
  if (first == 0xED) return second >= 0x80 && second <= 0x9F;
  if (first == 0xF0) return second >= 0x90 && second <= 0xBF;
  if (first == 0xF4) return second >= 0x80 && second <= 0x8F;
  return second >= 0x80 && second <= 0xBF;
}

// Characters below U+0300 are their own normal form and never combine with the character before. Most text is of this kind.
bool surely_nfc(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0xCC; });
}

constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);

int combining_class(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

}  // namespace

CharClass char_class(char32_t c) {
  if (is_space(c)) return CharClass::space;
  if (c < 0x80) {
    if ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') return CharClass::letter;
    return c >= '0' && c <= '9' ? CharClass::number : CharClass::other;
  }
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO: return CharClass::letter;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME: return CharClass::mark;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO: return CharClass::number;
    case UTF8PROC_CATEGORY_CN: return later_class(c);
    default: return CharClass::other;
  }
}

DecodedChar decode_utf8(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {first, 1, true, false};
  const uint32_t length = first >= 0xC2 && first <= 0xDF   ? 2
                          : first >= 0xE0 && first <= 0xEF ? 3
                          : first >= 0xF0 && first <= 0xF4 ? 4
                                                           : 0;
  if (length == 0) return {};
  char32_t value = first & (0x7Fu >> length);
  for (uint32_t i = 1; i < length; ++i) {
    if (at + i == text.size()) return {kReplacement, i, false, true};
    if (i == 1 ? !second_fits(first, byte(1)) : !is_continuation(text[at + i])) return {kReplacement, i, false, false};
    value = value << 6 | (byte(i) & 0x3Fu);
  }
  return {value, length, true, false};
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (c < 0x80) return put(c);
  if (c < 0x800) {
    put(0xC0 | c >> 6);
  } else {
    if (c < 0x10000) {
      put(0xE0 | c >> 12);
    } else {
      put(0xF0 | c >> 18);
      put(0x80 | (c >> 12 & 0x3F));
    }
    put(0x80 | (c >> 6 & 0x3F));
  }
  put(0x80 | (c & 0x3F));
}

std::string to_well_formed(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const DecodedChar c = decode_utf8(text, at);
    if (c.well_formed)
      out.append(text.substr(at, c.bytes));
    else
      append_utf8(out, kReplacement);
    at += c.bytes;
  }
  return out;
}

std::string to_nfc(std::string_view text) {
  if (surely_nfc(text)) return std::string(text);
  // utf8proc_map() could do all of this, but it sorts marks in quadratic time.
  std::vector<utf8proc_int32_t> buffer;
  buffer.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const DecodedChar c = decode_utf8(text, at);
    at += c.bytes;
    utf8proc_int32_t parts[32];  // canonical decompositions have at most 4
    int boundary = 0;
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c.value), parts, std::size(parts), kCompose, &boundary);
    if (count < 0 || count > static_cast<utf8proc_ssize_t>(std::size(parts)))
      throw Error({Code::invalid_argument, "tokenizer", "text", "tokenizer: text cannot be brought to normal form C"});
    buffer.insert(buffer.end(), parts, parts + count);
  }
  for (auto run = buffer.begin(); run != buffer.end();) {
    const auto starts = [](utf8proc_int32_t c) { return combining_class(c) == 0; };
    run = std::find_if_not(run, buffer.end(), starts);
    const auto end = std::find_if(run, buffer.end(), starts);
    std::stable_sort(run, end, [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    run = end;
  }
  const utf8proc_ssize_t length = utf8proc_normalize_utf32(buffer.data(), static_cast<utf8proc_ssize_t>(buffer.size()), kCompose);
  std::string out;
  out.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < length; ++i) append_utf8(out, static_cast<char32_t>(buffer[static_cast<size_t>(i)]));
  return out;
}

}  // namespace weft::model
