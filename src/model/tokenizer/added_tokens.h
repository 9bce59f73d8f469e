// Added tokens: strings such as "<|im_end|>" that are one token wherever they occur in a text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft::model {

struct AddedToken {
  int32_t id = 0;
  std::string content;      // not empty, at most kMaxAddedToken bytes
  bool left_strip = false;  // also consumes the white space before it
  bool right_strip = false;
  bool normalized = false;  // searched in the normalised text
  bool special = false;
};

inline constexpr size_t kMaxAddedToken = 1024;

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  struct Found {
    size_t begin = 0, end = 0;  // the bytes that the token consumes; empty at the end of the text if there is no token
    const AddedToken* token = nullptr;
  };
  // The leftmost token at or after `from`, and the longest of those that begin there. Stripping to the left stops at `from`.
  Found find(std::string_view text, size_t from) const;

 private:
  const AddedToken* longest_at(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;  // sorted by content
  std::vector<uint32_t> begins_;    // [257]: tokens whose first byte is b are begins_[b] .. begins_[b + 1]
};

}  // namespace weft::model
