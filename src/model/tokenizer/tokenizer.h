// The byte-level BPE tokenizer of the Qwen families, read from tokenizer.json or from a GGUF file.
//
// encode: added tokens are found first (leftmost, longest). The text between them is normalised to Unicode NFC and split into words
// by the split pattern of the family. The bytes of each word are merged pair by pair, lowest rank first. decode: the bytes of the
// tokens, one after another, and for an added token its text. Text is UTF-8. encode and decode replace every maximal ill-formed
// part by one U+FFFD.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::files {
class GgufFields;
}

namespace weft::model {

// A part of a text.
struct TextPart {
  std::string_view text;
  bool added = false;  // texts of added tokens become these tokens
};

class Tokenizer {
 public:
  // Reads directory/tokenizer.json, or the metadata of a GGUF file. Throws weft::Error for anything that is not a tokenizer of this
  // kind.
  static Tokenizer load(const std::filesystem::path& model);
  static Tokenizer from_gguf(const files::GgufFields& fields);
  // The same from the contents of such a file.
  static Tokenizer parse(std::string_view json);

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Thread-safe, like all members below. O(n log n) for any text. Adds no token at either end.
  std::vector<int32_t> encode(std::string_view text) const;
  // The same where there are at most `most` tokens; absent where there are more, without encoding the rest.
  std::optional<std::vector<int32_t>> encode(std::string_view text, size_t most) const;
  // The tokens of the parts as one text, but added tokens are looked for in some parts only, and do not reach across two parts.
  // Normalisation and words do.
  std::vector<int32_t> encode(std::span<const TextPart> parts) const;
  std::optional<std::vector<int32_t>> encode(std::span<const TextPart> parts, size_t most) const;
  // Returns well-formed UTF-8. Ids that the vocabulary lacks are skipped, and special tokens too if `special` is false.
  std::string decode(std::span<const int32_t> ids, bool special = true) const;

  // The bytes of a token, possibly a part of a character. Empty for an id that the vocabulary lacks.
  std::string_view bytes(int32_t id) const;
  // The id of the token with this text: token_id("<|endoftext|>"), token_id(" the").
  std::optional<int32_t> token_id(std::string_view text) const;
  bool is_special(int32_t id) const;  // an added token with "special": true
  bool is_added(int32_t id) const;    // encode() finds its text before it splits words
  // One more than the largest id, so that every id lies in [0, size()). A model's vocab_size may be larger.
  int32_t size() const;

 private:
  struct Tables;
  explicit Tokenizer(std::unique_ptr<const Tables> tables);
  std::unique_ptr<const Tables> tables_;
};

// Decodes a stream of tokens. push() holds back the bytes of an incomplete character, so that every result is well-formed UTF-8.
// The results of all push() calls and of finish() together are exactly decode() of all ids. The tokenizer must outlive the decoder.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool special = true) : tokenizer_(tokenizer), special_(special) {}
  std::string push(int32_t id);
  std::string finish();  // what is still held back, as U+FFFD; afterwards the decoder is ready for another stream

 private:
  const Tokenizer& tokenizer_;
  bool special_;
  std::string pending_;  // at most 3 bytes between calls
};

}  // namespace weft::model
