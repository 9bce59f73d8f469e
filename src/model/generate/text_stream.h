// Where a streamed text ends: at a stop string, or at the end of a sentence.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/status.h"

namespace weft::model {

// Is every stop string well-formed UTF-8 and not empty? A fault of `op`.
Status check_stop_strings(const std::vector<std::string>& stop_strings, const char* op);

// Holds text back while it could still become part of a stop string. Pieces must be whole UTF-8 characters; so are the results.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {}

  // Returns the text that cannot be part of a stop string. After a stop string: the text before it once, then empty strings.
  std::string push(std::string_view piece);
  std::string finish();  // the text that is held back
  std::optional<size_t> stopped() const { return stopped_; }

 private:
  std::vector<std::string> strings_;
  std::string held_;
  std::optional<size_t> stopped_;
};

// Finds white space that follows the end of a sentence: . ! ? or an ellipsis, and closing quotes and brackets behind it.
class SentenceEnd {
 public:
  // Where in the next piece of a text the first such white space begins. Pieces where the text may not end yet must be passed too,
  // with `wanted` false.
  std::optional<size_t> find(std::string_view piece, bool wanted = true);

 private:
  bool ended_ = false;  // the text so far ends like a sentence
};

}  // namespace weft::model
