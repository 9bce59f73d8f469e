// Pre-tokenisation: splits text into words as the split patterns of the Qwen families do.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace weft::model {

// The patterns differ in combining marks: they belong to words (Qwen3.5) or are symbols (Qwen2, Qwen3, Qwen3-Next).
enum class SplitPattern { qwen2, qwen3_5 };

// The pattern whose regular expression in tokenizer.json is exactly `regex`.
std::optional<SplitPattern> split_pattern(std::string_view regex);

// The end of the word that begins at text[at], at < text.size(). `text` is well-formed UTF-8. The words of a text, one after
// another, are the whole text. Splitting a text takes linear time.
size_t word_end(SplitPattern pattern, std::string_view text, size_t at);

}  // namespace weft::model
