// The tokenizer of a model without its weights: text to tokens and back.
//
// The byte-level BPE of tokenizer.json, as the Qwen families use it. Text is UTF-8; every maximal ill-formed part of a text counts as
// U+FFFD.
//
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

namespace model {
class Tokenizer;
}

// Immutable: several threads may call any member at the same time.
class Tokenizer {
 public:
  // Reads tokenizer.json of a folder, or the metadata of a GGUF file. Throws Error with a sentence for anything that is not a
  // tokenizer of this kind.
  static Tokenizer load(const std::filesystem::path& path);

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // As Model::encode and Model::decode.
  std::vector<int32_t> encode(std::string_view text) const;
  // The same where there are at most `most` tokens; absent where there are more, which is found without encoding the whole text.
  std::optional<std::vector<int32_t>> encode(std::string_view text, size_t most) const;
  std::string decode(std::span<const int32_t> tokens) const;
  // The bytes of a token, possibly a part of a character; empty for an id that the vocabulary lacks.
  std::string_view bytes(int32_t token) const;
  // The token with exactly these bytes: token("<|endoftext|>"), token(" the").
  std::optional<int32_t> token(std::string_view bytes) const;
  bool is_special(int32_t token) const;  // an added token with "special": true
  bool is_added(int32_t token) const;    // an added token: where its text occurs, encode() gives this token
  int32_t size() const;                  // one more than the largest id

 private:
  explicit Tokenizer(std::unique_ptr<const model::Tokenizer> tokenizer);
  std::unique_ptr<const model::Tokenizer> tokenizer_;
};

// The text with every maximal ill-formed part of it replaced by U+FFFD.
std::string to_well_formed_utf8(std::string_view text);

}  // namespace weft
#pragma GCC visibility pop
