// Where a streamed text ends: at a stop string, or at the end of a sentence.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/status.h"

namespace weft::model {

// A fault of `op` for a stop string that is empty or no well-formed UTF-8.
Status check_stop_strings(const std::vector<std::string>& stop_strings, const char* op);

// Holds text back while it could still become part of a stop string. Pieces must be whole UTF-8 characters; results are, too.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {}

  // Returns the text that cannot become part of a stop string. The call that completes a stop string returns the text before the
  // stop string; later calls return empty strings.
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
  // Where the first such white space begins in the next piece of the text. Pass every piece of the text; `wanted` is false for
  // pieces in which the text must not end yet.
  std::optional<size_t> find(std::string_view piece, bool wanted = true);

 private:
  bool ended_ = false;  // the text so far ends like a sentence
};

}  // namespace weft::model
