// The vocabulary of tokenizer.json while the file is read: see vocabulary.h.
#include "model/tokenizer/vocabulary.h"

#include <algorithm>

#include "files/refuse.h"

namespace weft::model {

using files::JsonPart;

Vocabulary::Vocabulary(const JsonPart& object, uint64_t limit, size_t longest, const std::string& file)
    : file_(file), limit_(limit), object_(object.text()) {
  entries_.reserve(object.size());
  object.member_texts([&](std::string_view quoted, const JsonPart& value) {
    if (quoted.size() > longest)
      files::refuse(file, "model.vocab",
                    "has a token of " + std::to_string(quoted.size()) + " bytes, wanted at most " + std::to_string(longest));
    const std::optional<uint64_t> id = value.whole();
    if (!id || *id >= limit) {
      std::string buffer;
      refuse_id("model.vocab[" + files::in_quotes(JsonPart::unescaped(quoted, buffer)) + "]", files::json_text(value));
    }
    const auto begin = static_cast<uint32_t>(quoted.data() - object_.data());
    entries_.push_back({begin, static_cast<uint32_t>(quoted.size()), static_cast<int32_t>(*id)});
    text_bytes_ += quoted.size();
  });
  std::string a_buffer, b_buffer;
  std::sort(entries_.begin(), entries_.end(),
            [&](const Entry& a, const Entry& b) { return text_of(a, a_buffer) < text_of(b, b_buffer); });
  for (size_t i = 1; i < entries_.size(); ++i)
    if (const std::string_view text = text_of(entries_[i], a_buffer); text == text_of(entries_[i - 1], b_buffer))
      files::refuse(file, "", "repeats the key " + files::in_quotes(text));
}

void Vocabulary::refuse_id(const std::string& field, const std::string& value) const {
  files::refuse(file_, field, "is " + value + ", wanted an id below " + std::to_string(limit_) + " for a vocabulary of this size");
}

std::optional<int32_t> Vocabulary::find(std::string_view text) const {
  std::string buffer;
  const auto found = std::lower_bound(entries_.begin(), entries_.end(), text,
                                      [&](const Entry& entry, std::string_view t) { return text_of(entry, buffer) < t; });
  if (found == entries_.end() || text_of(*found, buffer) != text) return std::nullopt;
  return found->id;
}

}  // namespace weft::model
