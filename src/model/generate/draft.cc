// Proposals by n-gram look-up: see draft.h.
#include "model/generate/draft.h"

#include <algorithm>

namespace weft::model {

std::vector<int32_t> propose(std::span<const int32_t> tokens, int64_t most) {
  if (most <= 0) return {};
  size_t best = 0, length = 0;  // where the proposal begins, and the matching tokens before it
  for (size_t end = tokens.size() - std::min<size_t>(tokens.size(), 1); end >= kShortestMatch; --end) {
    size_t match = 0;
    while (match < kLongestMatch && match < end && tokens[end - 1 - match] == tokens[tokens.size() - 1 - match]) ++match;
    if (match > length) {
      length = match;
      best = end;
      if (length == kLongestMatch) break;
    }
  }
  if (length < kShortestMatch) return {};
  const auto found = tokens.subspan(best).first(std::min(static_cast<size_t>(most), tokens.size() - best));
  return {found.begin(), found.end()};
}

}  // namespace weft::model
