// A byte-level BPE tokenizer, as tokenizer.json of the Qwen families describes it.
//
// encode: added tokens are found first (leftmost, longest); what is between them is brought to Unicode's NFC, cut into words by the
// family's split pattern, and each word's bytes are merged pair by pair, lowest rank first. decode: the bytes of the tokens, one
// after the other, and for an added token its text. Text is UTF-8; a byte that is not part of a well-formed character is taken for
// U+FFFD, one for every maximal ill-formed part, which is also what decode writes for bytes that form no character.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::model {

class Tokenizer {
 public:
  // Reads directory/tokenizer.json. Throws weft::Error with a sentence for anything that is not a tokenizer of this kind.
  static Tokenizer load(const std::filesystem::path& directory);
  // The same from the text of such a file.
  static Tokenizer parse(std::string_view json);

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Thread-safe, as all of the following. O(n log n) for any text. No token is added at either end.
  std::vector<int32_t> encode(std::string_view text) const;
  // Well-formed UTF-8. An id that the vocabulary lacks gives nothing. With `special` false, special tokens give nothing either.
  std::string decode(std::span<const int32_t> ids, bool special = true) const;

  // The bytes that a token stands for, possibly a part of a character; empty for an id that the vocabulary lacks.
  std::string_view bytes(int32_t id) const;
  // The id of a token, by the text that it stands for: token_id("<|endoftext|>"), token_id(" the").
  std::optional<int32_t> token_id(std::string_view text) const;
  bool is_special(int32_t id) const;  // an added token with "special": true
  // One more than the largest id, so that every id lies in [0, size()). A model's vocab_size may be larger.
  int32_t size() const;

 private:
  struct Tables;
  explicit Tokenizer(std::unique_ptr<const Tables> tables);
  std::unique_ptr<const Tables> tables_;
};

// Decodes a stream of tokens: holds back the bytes of a character that is not complete yet, so that every piece is well-formed UTF-8.
// The pieces and finish() together are exactly decode() of all ids. The tokenizer must outlive it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool special = true) : tokenizer_(tokenizer), special_(special) {}
  std::string push(int32_t id);
  std::string finish();  // what is still held back, ill-formed as it is: U+FFFD; ready for another stream afterwards

 private:
  const Tokenizer& tokenizer_;
  bool special_;
  std::string pending_;  // at most 3 bytes between calls
};

}  // namespace weft::model
