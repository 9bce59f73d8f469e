// The tokens that texts of sessions were made of.
//
// A client sends texts, and a text that is tokenized again may give other tokens than the model wrote. The memory of a session fits
// its own tokens only. So the server remembers text and tokens of each session, and a request whose text begins with that text
// begins with those tokens.
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
    size_t bytes = 0;             // of the text
    std::vector<int32_t> tokens;  // that these bytes are
  };
  // Where the text of a prompt changes between content and control text, which gives other tokens.
  using Changes = std::vector<size_t>;

  // The remembered beginning of a text; empty where the text of the session is none.
  Beginning find(const std::string& session, std::string_view text, const Changes& changes = {});
  // The text is `prompt` and `written`; the tokens are those of the prompt and those that were written. Of the written tokens, those
  // are kept whose bytes are the beginning of `written`.
  void keep(const std::string& session, std::string prompt, std::vector<int32_t> prompt_tokens, std::string_view written,
            const std::vector<int32_t>& written_tokens, const Tokenizer& tokenizer, Changes changes = {});
  bool knows(const std::string& session);
  bool forget(const std::string& session);  // was it known?

 private:
  struct Entry {
    std::string session, text;
    std::vector<int32_t> tokens;
    size_t prompt = 0;  // bytes of `text`
    Changes changes;    // in these
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
  std::list<Entry> entries_;  // the one used last comes first
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
  size_t bytes_ = 0;
};

// The beginning of `text` that the tokens of a session's file are, as SessionTexts::find gives it. `whole` are the tokens of `text` as
// it is encoded. Empty where the text does not begin with the bytes of `saved`, or where the two differ in added tokens: then content
// and control text are not what they were.
SessionTexts::Beginning saved_beginning(std::string_view text, std::span<const int32_t> whole, std::vector<int32_t> saved,
                                        const Tokenizer& tokenizer);

}  // namespace weft::serve
