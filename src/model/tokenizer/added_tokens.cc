// Finds added tokens in a text: see added_tokens.h.
#include "model/tokenizer/added_tokens.h"

#include <algorithm>

#include "model/tokenizer/unicode.h"

namespace weft::model {
namespace {

unsigned char byte_at(std::string_view text, size_t i) { return static_cast<unsigned char>(text[i]); }

// Moves `at` left over white space, at most to `limit`.
size_t skip_left(std::string_view text, size_t at, size_t limit) {
  while (at > limit) {
    size_t begin = at - 1;
    while (begin > limit && (byte_at(text, begin) & 0xC0) == 0x80) --begin;
    if (char_class(decode_utf8(text, begin).value) != CharClass::space) break;
    at = begin;
  }
  return at;
}

size_t skip_right(std::string_view text, size_t at) {
  while (at < text.size()) {
    const DecodedChar c = decode_utf8(text, at);
    if (char_class(c.value) != CharClass::space) break;
    at += c.bytes;
  }
  return at;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)), begins_(257) {
  std::sort(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  for (const AddedToken& token : tokens_) ++begins_[byte_at(token.content, 0) + 1u];
  for (size_t b = 1; b < begins_.size(); ++b) begins_[b] += begins_[b - 1];
}

const AddedToken* AddedTokens::longest_at(std::string_view text, size_t at) const {
  const AddedToken* found = nullptr;
  auto begin = tokens_.begin() + begins_[byte_at(text, at)], end = tokens_.begin() + begins_[byte_at(text, at) + 1u];
  // [begin, end) are the tokens that match the text in their first i bytes. The shortest of them comes first.
  for (size_t i = 1; begin != end; ++i) {
    while (begin != end && begin->content.size() == i) found = &*begin++;
    if (at + i == text.size()) break;
    const unsigned char wanted = byte_at(text, at + i);
    begin = std::lower_bound(begin, end, wanted, [&](const AddedToken& t, unsigned char b) { return byte_at(t.content, i) < b; });
    end = std::upper_bound(begin, end, wanted, [&](unsigned char b, const AddedToken& t) { return b < byte_at(t.content, i); });
  }
  return found;
}

AddedTokens::Found AddedTokens::find(std::string_view text, size_t from) const {
  if (!tokens_.empty())
    for (size_t at = from; at < text.size(); ++at)
      if (const AddedToken* token = longest_at(text, at)) {
        const size_t end = at + token->content.size();
        return {token->left_strip ? skip_left(text, at, from) : at, token->right_strip ? skip_right(text, end) : end, token};
      }
  return {text.size(), text.size(), nullptr};
}

}  // namespace weft::model
