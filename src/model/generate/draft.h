// Proposals of the next tokens by n-gram look-up: the tokens that followed an earlier occurrence of the last tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft::model {

// Up to `most` tokens that followed the latest earlier occurrence of the last kLongestMatch tokens of a sequence. Where that many
// tokens did not occur before, fewer are matched, down to kShortestMatch. Empty without any match.
inline constexpr size_t kLongestMatch = 4, kShortestMatch = 2;
std::vector<int32_t> propose(std::span<const int32_t> tokens, int64_t most);

}  // namespace weft::model
