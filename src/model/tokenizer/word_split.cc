// Pre-tokenisation: see word_split.h.
#include "model/tokenizer/word_split.h"

#include "model/tokenizer/unicode.h"

namespace weft::model {
namespace {

constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Tries the alternatives of the pattern in order, with the results of a backtracking regex matcher.
class Scanner {
 public:
  Scanner(SplitPattern pattern, std::string_view text) : pattern_(pattern), text_(text) {}

  size_t word_end(size_t at) const {
    const char first = text_[at];
    if (first == '\'')
      if (const size_t end = contraction(at)) return end;
    const size_t next = at + bytes(at);
    const CharClass kind = kind_at(at);
    const bool newline = first == '\r' || first == '\n';
    // [^\r\n\p{L}\p{N}]?\p{L}+
    if (is_word(kind)) return end_of(at, &Scanner::is_word);
    if (!newline && kind != CharClass::number && next < text_.size() && is_word(kind_at(next)))
      return end_of(next, &Scanner::is_word);
    if (kind == CharClass::number) return next;
    //  ?[^\s\p{L}\p{N}]+[\r\n]*
    const size_t symbols = first == ' ' ? next : at;
    if (symbols < text_.size() && is_symbol(kind_at(symbols))) return newlines_end(end_of(symbols, &Scanner::is_symbol));
    return space_end(at);
  }

 private:
  bool is_word(CharClass kind) const {
    return kind == CharClass::letter || (kind == CharClass::mark && pattern_ == SplitPattern::qwen3_5);
  }
  bool is_symbol(CharClass kind) const {
    return kind == CharClass::other || (kind == CharClass::mark && pattern_ == SplitPattern::qwen2);
  }
  size_t bytes(size_t at) const { return decode_utf8(text_, at).bytes; }
  CharClass kind_at(size_t at) const { return char_class(decode_utf8(text_, at).value); }

  // The end of the run of characters of one class that begins at `at`.
  size_t end_of(size_t at, bool (Scanner::*belongs)(CharClass) const) const {
    while (at < text_.size()) {
      const DecodedChar c = decode_utf8(text_, at);
      if (!(this->*belongs)(char_class(c.value))) break;
      at += c.bytes;
    }
    return at;
  }

  size_t newlines_end(size_t at) const {
    while (at < text_.size() && (text_[at] == '\r' || text_[at] == '\n')) ++at;
    return at;
  }

  // (?i:'s|'t|'re|'ve|'m|'ll|'d); returns 0 if there is none. Ignoring case, U+017F (long s) is an s.
  size_t contraction(size_t at) const {
    const auto letter = [&](size_t i) { return at + i < text_.size() ? static_cast<char>(text_[at + i] | 0x20) : '\0'; };
    const char first = letter(1), second = letter(2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if ((first == 'r' || first == 'v') && second == 'e') return at + 3;
    if (first == 'l' && second == 'l') return at + 3;
    return text_.substr(at + 1, 2) == "\xC5\xBF" ? at + 3 : 0;
  }

  // \s*[\r\n]+|\s+(?!\S)|\s+: up to the last newline of the run, else all but the last space before a word, else all.
  size_t space_end(size_t at) const {
    size_t end = at, last = at, newline = 0;
    while (end < text_.size()) {
      const DecodedChar c = decode_utf8(text_, end);
      if (char_class(c.value) != CharClass::space) break;
      last = end;
      end += c.bytes;
      if (c.value == '\r' || c.value == '\n') newline = end;
    }
    if (newline != 0) return newline;
    return end == text_.size() || last == at ? end : last;
  }

  SplitPattern pattern_;
  std::string_view text_;
};

}  // namespace

std::optional<SplitPattern> split_pattern(std::string_view regex) {
  if (regex == kQwen2) return SplitPattern::qwen2;
  if (regex == kQwen35) return SplitPattern::qwen3_5;
  return std::nullopt;
}

size_t word_end(SplitPattern pattern, std::string_view text, size_t at) { return Scanner(pattern, text).word_end(at); }

}  // namespace weft::model
