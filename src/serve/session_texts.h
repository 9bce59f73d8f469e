// The tokens of the texts of sessions.
//
// A client sends texts, and a text that is tokenized again may give other tokens than the model wrote. The state of a session fits
// its own tokens only. So the server remembers the text and the tokens of each session. A request whose text begins with the text
// of the session begins with the tokens of the session.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "weft/tokenizer.h"

namespace weft::serve {

// Thread-safe. Holds the sessions used last, up to a number of bytes, and for a time after their last use.
class SessionTexts {
 public:
  using Clock = std::chrono::steady_clock;

  explicit SessionTexts(size_t most_bytes, Clock::duration expiry = std::chrono::hours(24 * 365))
      : most_(most_bytes), expiry_(expiry) {}
  void set_expiry(Clock::duration expiry);

  struct Beginning {
    size_t bytes = 0;             // length of the beginning of the text
    std::vector<int32_t> tokens;  // the tokens of these bytes
  };
  // Positions at which the text of a prompt changes between content and control text. Other positions give other tokens.
  using Changes = std::vector<size_t>;

  // The remembered beginning of `text`; empty where `text` does not begin with the text of the session.
  Beginning find(const std::string& session, std::string_view text, const Changes& changes = {});
  // Remembers the text `prompt` + `written`, with the tokens of the prompt and the written tokens. Of the written tokens, those are
  // kept whose bytes are the beginning of `written`.
  void keep(const std::string& session, std::string prompt, std::vector<int32_t> prompt_tokens, std::string_view written,
            const std::vector<int32_t>& written_tokens, const Tokenizer& tokenizer, Changes changes = {});
  bool knows(const std::string& session);
  bool forget(const std::string& session);  // was it known?

 private:
  struct Entry {
    std::string session, text;
    std::vector<int32_t> tokens;
    size_t prompt = 0;  // bytes of `text` that are the prompt
    Changes changes;    // changes in the prompt
    Clock::time_point used = Clock::now();
    size_t bytes() const {
      return session.size() + text.size() + tokens.size() * sizeof(int32_t) + changes.size() * sizeof(size_t) + sizeof(Entry);
    }
  };
  void erase(std::list<Entry>::iterator entry);
  void expire();

  const size_t most_;
  std::mutex lock_;
  Clock::duration expiry_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
  size_t bytes_ = 0;
};

// The beginning of `text` that the tokens `saved` of a session's file stand for, as SessionTexts::find gives it. `whole` are the
// tokens of `text` as it is encoded. Empty where the text does not begin with the bytes of `saved`, or where `saved` and `whole`
// differ in added tokens, because content and control text then differ, too.
SessionTexts::Beginning saved_beginning(std::string_view text, std::span<const int32_t> whole, std::vector<int32_t> saved,
                                        const Tokenizer& tokenizer);

}  // namespace weft::serve
