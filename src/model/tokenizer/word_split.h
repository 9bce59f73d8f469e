// Cutting text into words before the merges of a BPE, as the split patterns of the Qwen families do.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace weft::model {

// The patterns differ in one thing: combining marks belong to words (Qwen3.5), or they are symbols (Qwen2, Qwen3, Qwen3-Next).
enum class SplitPattern { qwen2, qwen3_5 };

// By the exact text of the regular expression in tokenizer.json.
std::optional<SplitPattern> split_pattern(std::string_view regex);

// End of the word that begins at text[at], at < text.size(); text is well-formed UTF-8. The words of a text, one after the other, are
// the whole text. Linear over a text.
size_t word_end(SplitPattern pattern, std::string_view text, size_t at);

}  // namespace weft::model
