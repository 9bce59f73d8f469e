// Added tokens: texts such as "<|im_end|>" that are one token wherever they stand.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft::model {

struct AddedToken {
  int32_t id = 0;
  std::string content;      // not empty, at most kMaxAddedToken bytes
  bool left_strip = false;  // takes the white space before it
  bool right_strip = false;
  bool normalized = false;  // looked for in the normal form of the text
  bool special = false;
};

inline constexpr size_t kMaxAddedToken = 1024;

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  struct Found {
    size_t begin = 0, end = 0;  // what the token takes of the text; empty at the end of the text when there is none
    const AddedToken* token = nullptr;
  };
  // The leftmost token at or after `from`, the longest of those that begin there. `from` is also how far left stripping may reach.
  Found find(std::string_view text, size_t from) const;

 private:
  const AddedToken* longest_at(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;  // by content
  std::vector<uint32_t> begins_;    // [257]: tokens whose first byte is b are begins_[b] .. begins_[b + 1]
};

}  // namespace weft::model
