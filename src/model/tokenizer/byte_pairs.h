// The merges of a byte pair encoding: which two tokens become one, and in which order.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace weft::model {

struct Merge {
  int32_t left, right, merged;
};

class BytePairs {
 public:
  BytePairs() = default;
  // `merges` are sorted by rank, lowest first. Of two merges for the same pair, the later one counts. `bytes[b]` is the token of
  // byte b. Ids are in [0, size).
  BytePairs(std::vector<Merge> merges, const std::array<int32_t, 256>& bytes, int32_t size);

  // Appends the tokens of a word. O(n log n).
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

 private:
  static constexpr int32_t kNone = -1;
  int32_t rank_of(int32_t left, int32_t right) const;

  std::vector<Merge> merges_;  // by rank
  std::array<int32_t, 256> bytes_{};
  // Merges by left token: those of token t are rights_[begins_[t]] .. rights_[begins_[t + 1]], sorted by right token.
  struct Right {
    int32_t token, rank;
  };
  std::vector<int32_t> begins_;
  std::vector<Right> rights_;
};

}  // namespace weft::model
