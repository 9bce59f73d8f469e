// The tokens of the texts of sessions: see session_texts.h.
#include "serve/session_texts.h"

#include <algorithm>
#include <utility>

namespace weft::serve {

SessionTexts::Beginning SessionTexts::find(const std::string& session, std::string_view text, const Changes& changes) {
  const std::scoped_lock guard(lock_);
  expire();
  const auto found = index_.find(session);
  if (found == index_.end()) return {};
  entries_.splice(entries_.begin(), entries_, found->second);
  Entry& entry = entries_.front();
  entry.used = Clock::now();
  if (!text.starts_with(entry.text)) return {};
  const auto end = std::lower_bound(changes.begin(), changes.end(), entry.prompt);
  if (!std::equal(changes.begin(), end, entry.changes.begin(), entry.changes.end())) return {};
  return {entry.text.size(), entry.tokens};
}

void SessionTexts::keep(const std::string& session, std::string prompt, std::vector<int32_t> prompt_tokens,
                        std::string_view written, const std::vector<int32_t>& written_tokens, const Tokenizer& tokenizer,
                        Changes changes) {
  Entry entry{.session = session, .text = std::move(prompt), .tokens = std::move(prompt_tokens), .changes = std::move(changes)};
  entry.prompt = entry.text.size();
  for (int32_t token : written_tokens) {
    const std::string_view bytes = tokenizer.bytes(token);
    if (!written.starts_with(bytes)) break;
    written.remove_prefix(bytes.size());
    entry.text += bytes;
    entry.tokens.push_back(token);
  }
  const std::scoped_lock guard(lock_);
  if (const auto found = index_.find(session); found != index_.end()) erase(found->second);
  bytes_ += entry.bytes();
  entries_.push_front(std::move(entry));
  index_[session] = entries_.begin();
  expire();
  while (bytes_ > most_ && entries_.size() > 1) erase(std::prev(entries_.end()));
}

bool SessionTexts::knows(const std::string& session) {
  const std::scoped_lock guard(lock_);
  expire();
  return index_.contains(session);
}

bool SessionTexts::forget(const std::string& session) {
  const std::scoped_lock guard(lock_);
  const auto found = index_.find(session);
  if (found == index_.end()) return false;
  erase(found->second);
  return true;
}

void SessionTexts::set_expiry(Clock::duration expiry) {
  const std::scoped_lock guard(lock_);
  expiry_ = expiry;
}

void SessionTexts::expire() {
  const Clock::time_point now = Clock::now();
  while (!entries_.empty() && now - entries_.back().used >= expiry_) erase(std::prev(entries_.end()));
}

void SessionTexts::erase(std::list<Entry>::iterator entry) {
  bytes_ -= entry->bytes();
  index_.erase(entry->session);
  entries_.erase(entry);
}

SessionTexts::Beginning saved_beginning(std::string_view text, std::span<const int32_t> whole, std::vector<int32_t> saved,
                                        const Tokenizer& tokenizer) {
  size_t bytes = 0;
  std::vector<std::pair<size_t, int32_t>> added;  // added tokens: position in the text, and id
  for (const int32_t token : saved) {
    const std::string_view own = tokenizer.bytes(token);
    if (!text.substr(bytes).starts_with(own)) return {};
    if (tokenizer.is_added(token)) added.emplace_back(bytes, token);
    bytes += own.size();
  }
  size_t at = 0;
  auto next = added.begin();
  for (const int32_t token : whole) {
    if (at >= bytes) break;
    if (tokenizer.is_added(token) && (next == added.end() || *next++ != std::pair(at, token))) return {};
    at += tokenizer.bytes(token).size();
  }
  if (next != added.end()) return {};
  return {bytes, std::move(saved)};
}

}  // namespace weft::serve
