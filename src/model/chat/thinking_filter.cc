// Splits a streamed answer into thinking and answer: see weft/chat.h.
#include <algorithm>
#include <utility>

#include "weft/chat.h"

namespace weft {
namespace {

// The longest end of `text` that is the beginning of `marker`, in bytes.
size_t begun(std::string_view text, std::string_view marker) {
  for (size_t length = std::min(text.size(), marker.size() - 1); length > 0; --length)
    if (text.ends_with(marker.substr(0, length))) return length;
  return 0;
}

}  // namespace

ThinkingFilter::ThinkingFilter(std::string open, std::string close, bool opened)
    : open_(std::move(open)), close_(std::move(close)), thinking_(opened && !close_.empty()), trims_(thinking_) {}

ThinkingFilter::Pieces ThinkingFilter::push(std::string_view text) {
  held_ += text;
  return take(false);
}

ThinkingFilter::Pieces ThinkingFilter::finish() { return take(true); }

ThinkingFilter::Pieces ThinkingFilter::take(bool all) {
  Pieces out;
  for (;;) {
    if (trims_) {  // line feeds behind a marker
      held_.erase(0, std::min(held_.find_first_not_of('\n'), held_.size()));
      if (held_.empty()) return out;
    }
    if (thinking_) {
      if (const size_t at = held_.find(close_); at != std::string::npos) {
        std::string_view block = std::string_view(held_).substr(0, at);
        while (block.ends_with('\n')) block.remove_suffix(1);
        out.thinking += block;
        held_.erase(0, at + close_.size());
        thinking_ = false;
        thought_ = trims_ = true;
        continue;
      }
      size_t certain = held_.size();
      if (!all) {
        certain -= begun(held_, close_);
        while (certain > 0 && held_[certain - 1] == '\n') --certain;  // a marker may follow, which takes these line feeds with it
      }
      if (certain > 0) trims_ = false;
      out.thinking += held_.substr(0, certain);
      held_.erase(0, certain);
      return out;
    }
    // A thinking block is recognised only at the beginning of an answer. Later, the marker is ordinary text.
    if (!any_answer_ && !thought_ && !open_.empty()) {
      const size_t begin = std::min(held_.find_first_not_of(" \n\r\t"), held_.size());
      const std::string_view rest = std::string_view(held_).substr(begin);
      if (rest.starts_with(open_)) {
        held_.erase(0, begin + open_.size());
        thinking_ = trims_ = true;
        continue;
      }
      if (!all && open_.starts_with(rest)) return out;
    }
    trims_ = false;
    any_answer_ = any_answer_ || !held_.empty();
    out.answer += std::exchange(held_, {});
    return out;
  }
}

}  // namespace weft
