// The writer of an answer of a chat, piece by piece.
#pragma once

#include <chrono>
#include <cstdint>

#include "weft/chat.h"

namespace weft::tools {

// The answer goes to stdout. Thinking goes there too, dimmed, or only its length to stderr, where stderr is a terminal.
class AnswerWriter {
 public:
  AnswerWriter(bool shows_thinking, bool quiet) : shows_thinking_(shows_thinking), quiet_(quiet) {}
  ~AnswerWriter() { erase(); }
  AnswerWriter(const AnswerWriter&) = delete;
  AnswerWriter& operator=(const AnswerWriter&) = delete;

  void write(const ThinkingFilter::Pieces& pieces, bool thinking);
  void finish();  // ends the line

 private:
  using Clock = std::chrono::steady_clock;
  void draw();
  void erase();

  const bool shows_thinking_, quiet_;
  int64_t tokens_ = 0;  // tokens of thinking so far
  bool thought_ = false, drawn_any_ = false;
  char last_ = 0;
  Clock::time_point drawn_{};
};

}  // namespace weft::tools
