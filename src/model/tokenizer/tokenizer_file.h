// The contents of tokenizer.json, or of the metadata of a GGUF file, checked.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "files/gguf.h"
#include "model/tokenizer/added_tokens.h"
#include "model/tokenizer/byte_pairs.h"
#include "model/tokenizer/word_split.h"

namespace weft::model {

// The bytes of every token, one after another in one string: a string per token would take several times the size of the file.
class TokenTable {
 public:
  int32_t size() const { return static_cast<int32_t>(places_.size()); }  // one more than the largest id
  bool has(int32_t id) const { return id >= 0 && id < size() && place(id).begin != kAbsent; }
  std::string_view bytes(int32_t id) const { return std::string_view(bytes_).substr(place(id).begin, place(id).size); }

  // Ids are in [0, ids); all bytes together are about `bytes`.
  void reserve(size_t ids, size_t bytes);
  // Makes `id` a token with the bytes of `token`, whatever it was before. Together these are less than 2^32 bytes.
  void set(int32_t id, std::string_view token);

 private:
  static constexpr uint32_t kAbsent = UINT32_MAX;
  struct Place {
    uint32_t begin = kAbsent, size = 0;
  };
  const Place& place(int32_t id) const { return places_[static_cast<size_t>(id)]; }

  std::vector<Place> places_;  // by id
  std::string bytes_;
};

struct TokenizerFile {
  TokenTable tokens;
  std::vector<AddedToken> added;
  std::vector<Merge> merges;  // by rank
  std::array<int32_t, 256> byte_tokens{};
  SplitPattern split = SplitPattern::qwen2;
  bool nfc = false;
  bool ignore_merges = false;  // a word that is a token becomes that token without merges
};

// Throws weft::Error whose message begins with `file`. `text` has less than 2^31 bytes. Takes at most 64 MB plus three times the
// bytes of the text beside the text itself.
TokenizerFile parse_tokenizer_file(std::string_view text, const std::string& file);
// The same from the file itself, whose text is released before this returns.
TokenizerFile read_tokenizer_file(const std::filesystem::path& path);

// The same from the metadata of a GGUF file: the model gpt2 with the pre-tokenizer qwen2 or qwen35. Takes at most 64 MB plus twice the
// bytes of the file.
TokenizerFile parse_gguf_tokenizer(const files::GgufFields& fields);
// Does the file name a tokenizer, supported or not?
bool has_gguf_tokenizer(const files::GgufFields& fields);

}  // namespace weft::model
