// Text from tokens as they come: see text_stream.h, and TextStream in weft/generate.h.
#include "model/generate/text_stream.h"

#include <algorithm>

#include "core/check.h"
#include "files/refuse.h"
#include "model/parts.h"
#include "model/tokenizer/unicode.h"
#include "weft/generate.h"

namespace weft {
namespace model {

Status check_stop_strings(const std::vector<std::string>& stop_strings, const char* op) {
  for (size_t i = 0; i < stop_strings.size(); ++i) {
    const std::string argument = "stop_strings[" + std::to_string(i) + "]";
    if (stop_strings[i].empty()) return fail(Code::invalid_argument, op, argument, "is empty, wanted a text");
    if (to_well_formed(stop_strings[i]) != stop_strings[i])
      return fail(Code::invalid_argument, op, argument, "is " + files::in_quotes(stop_strings[i]) + ", wanted well-formed UTF-8");
  }
  return {};
}

std::string StopStrings::push(std::string_view piece) {
  if (stopped_) return {};
  held_ += piece;
  // The string whose first occurrence ends first is the one that a reader of single characters would find.
  size_t first_end = std::string::npos, begin = held_.size();
  for (size_t i = 0; i < strings_.size(); ++i) {
    const size_t at = held_.find(strings_[i]), end = at + strings_[i].size();
    if (at == std::string::npos || end > first_end || (end == first_end && at >= begin)) continue;
    first_end = end;
    begin = at;
    stopped_ = i;
  }
  if (!stopped_) {
    // The longest end of the text that is the beginning of a stop string. Stop strings begin with whole characters, so this end
    // begins with one, too.
    size_t longest = 0;
    for (const std::string& text : strings_)
      for (size_t length = std::min(text.size() - 1, held_.size()); length > longest; --length)
        if (held_.ends_with(std::string_view(text).substr(0, length))) longest = length;
    begin = held_.size() - longest;
  }
  std::string certain = held_.substr(0, begin);
  held_.erase(0, stopped_ ? held_.size() : begin);
  return certain;
}

std::string StopStrings::finish() { return std::exchange(held_, {}); }

std::optional<size_t> SentenceEnd::find(std::string_view piece, bool wanted) {
  constexpr std::string_view kSpaces = " \t\n\v\f\r", kEnds = ".!?", kClosers = "\"')]}";
  constexpr char32_t kEllipsis = 0x2026, kClosingQuotes[] = {0x201D, 0x2019, 0xBB};
  for (size_t at = 0; at < piece.size();) {
    const char32_t c = decode_utf8(piece, at).value;
    const auto is_one_of = [&](std::string_view set) {
      return c < 0x80 && set.find(static_cast<char>(c)) != std::string_view::npos;
    };
    if (wanted && ended_ && is_one_of(kSpaces)) return at;
    if (is_one_of(kEnds) || c == kEllipsis)
      ended_ = true;
    else if (!is_one_of(kClosers) && std::ranges::find(kClosingQuotes, c) == std::end(kClosingQuotes))
      ended_ = false;
    at += decode_utf8(piece, at).bytes;
  }
  return std::nullopt;
}

}  // namespace model

struct TextStream::Parts {
  model::StreamDecoder decoder;
  model::StopStrings stops;
};

TextStream::TextStream(const Model& model, std::vector<std::string> stop_strings, bool special_text) {
  constexpr const char* kOp = "text_stream";
  const auto& tokenizer = model::parts_of(model).tokenizer;
  if (!tokenizer) throw Error(fail(Code::invalid_argument, kOp, "model", "has no tokenizer, so its tokens have no text"));
  if (Status status = model::check_stop_strings(stop_strings, kOp); !status) throw Error(std::move(status));
  parts_.reset(new Parts{model::StreamDecoder(*tokenizer, special_text), model::StopStrings(std::move(stop_strings))});
}
TextStream::~TextStream() = default;
TextStream::TextStream(TextStream&&) noexcept = default;
TextStream& TextStream::operator=(TextStream&&) noexcept = default;

std::string TextStream::push(int32_t token) { return parts_->stops.push(parts_->decoder.push(token)); }

std::string TextStream::finish() {
  std::string text = parts_->stops.push(parts_->decoder.finish());
  return text + parts_->stops.finish();
}

std::optional<size_t> TextStream::stopped() const { return parts_->stops.stopped(); }

}  // namespace weft
