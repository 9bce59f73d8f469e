// Proposals of the next tokens from the text so far, for a model to verify: what followed when the last tokens stood there before.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft::model {

// Up to `most` tokens that followed the latest earlier place where the last kLongestMatch tokens stood, or else fewer, down to
// kShortestMatch. Empty where there is no such place.
inline constexpr size_t kLongestMatch = 4, kShortestMatch = 2;
std::vector<int32_t> propose(std::span<const int32_t> tokens, int64_t most);

}  // namespace weft::model
