// The contents of tokenizer.json, checked.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer/added_tokens.h"
#include "model/tokenizer/byte_pairs.h"
#include "model/tokenizer/word_split.h"

namespace weft::model {

struct TokenizerFile {
  struct Token {
    std::string bytes;
    bool present = false;
  };
  std::vector<Token> tokens;  // by id
  std::vector<AddedToken> added;
  std::vector<Merge> merges;  // by rank
  std::array<int32_t, 256> byte_tokens{};
  SplitPattern split = SplitPattern::qwen2;
  bool nfc = false;
  bool ignore_merges = false;  // a word that is a token becomes that token without merges
};

// Throws weft::Error whose message begins with `file`.
TokenizerFile parse_tokenizer_file(std::string_view text, const std::string& file);

}  // namespace weft::model
