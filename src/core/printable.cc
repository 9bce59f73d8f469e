// Text that is safe for terminals: see weft/printable.h.
#include "weft/printable.h"

#include <cstdint>
#include <cstdio>

namespace weft {
namespace {

// A character of UTF-8, or one byte that is not part of a character.
struct Char {
  uint32_t value;
  size_t bytes;
  bool valid;
};

Char char_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) -> uint32_t { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0; };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  const size_t bytes = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  uint32_t value = lead & (0x7Fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {lead, 1, false};
    value = value << 6 | (byte(i) & 0x3F);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool valid =
      lead >= 0xC2 && lead <= 0xF4 && value >= kLeast[bytes] && value <= 0x10FFFF && (value < 0xD800 || value > 0xDFFF);
  return valid ? Char{value, bytes, true} : Char{lead, 1, false};
}

bool is_harmless(uint32_t c) {
  if (c < 0x20 || (c >= 0x7F && c <= 0x9F)) return false;                            // C0, delete, C1
  if (c == 0x061C || c == 0x200E || c == 0x200F) return false;                       // marks of direction
  if ((c >= 0x2028 && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069)) return false;    // separators, embeddings, isolates
  return (c < 0xE0000 || c > 0xE007F) && c != 0xFEFF && (c < 0xFFF9 || c > 0xFFFB);  // tags, BOM, annotations
}

}  // namespace

std::string printable_text(std::string_view text, std::string_view kept) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Char c = char_at(text, at);
    const bool keep = c.value < 0x80 && kept.find(static_cast<char>(c.value)) != std::string_view::npos;
    if (c.valid && (keep || is_harmless(c.value))) {
      out += text.substr(at, c.bytes);
    } else if (c.valid && (c.value == '\n' || c.value == '\r' || c.value == '\t')) {
      out += c.value == '\n' ? "\\n" : c.value == '\r' ? "\\r" : "\\t";
    } else {
      char escape[16];
      std::snprintf(escape, sizeof escape,
                    c.value < 0x80 || !c.valid ? "\\x%02x"
                    : c.value < 0x10000        ? "\\u%04x"
                                               : "\\U%08x",
                    static_cast<unsigned>(c.value));
      out += escape;
    }
    at += c.bytes;
  }
  return out;
}

}  // namespace weft
