// The vocabulary of tokenizer.json while the file is read: from the text of a token to its id.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_walk.h"

namespace weft::model {

// Texts stay in the file, which must outlive this object. An entry takes 12 bytes.
class Vocabulary {
 public:
  // `object` maps texts of at most `longest` bytes to ids below `limit`. Throws weft::Error for others, and for a text that occurs
  // twice.
  Vocabulary(const files::JsonPart& object, uint64_t limit, size_t longest, const std::string& file);

  size_t size() const { return entries_.size(); }
  // All texts together, as they are spelled in the file.
  size_t text_bytes() const { return text_bytes_; }
  std::optional<int32_t> find(std::string_view text) const;
  // Calls each(text, id) for every token, sorted by text. The text is valid during the call.
  template <class Each>
  void tokens(Each&& each) const {
    std::string buffer;
    for (const Entry& entry : entries_) each(text_of(entry, buffer), entry.id);
  }
  // Throws the weft::Error for a field whose value is not an id.
  [[noreturn]] void refuse_id(const std::string& field, const std::string& value) const;

 private:
  struct Entry {
    uint32_t begin, size;  // of the string in the file, with its quotes
    int32_t id;
  };
  std::string_view text_of(const Entry& entry, std::string& buffer) const {
    return files::JsonPart::unescaped(object_.substr(entry.begin, entry.size), buffer);
  }

  std::string file_;
  uint64_t limit_;
  std::string_view object_;
  std::vector<Entry> entries_;  // sorted by text
  size_t text_bytes_ = 0;
};

}  // namespace weft::model
