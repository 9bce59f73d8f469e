// Writing the answer of a chat: see answer_writer.h.
#include "tools/answer_writer.h"

#include "tools/terminal.h"

namespace weft::tools {

void AnswerWriter::write(const ThinkingFilter::Pieces& pieces, bool thinking) {
  if (!pieces.thinking.empty() && shows_thinking_) {
    show("{}", coloured(Colour::dim, pieces.thinking));
    last_ = pieces.thinking.back();
    thought_ = true;
  }
  if (thinking && !shows_thinking_) draw();
  if (!pieces.answer.empty()) {
    erase();
    if (thought_) show("\n\n");
    thought_ = false;
    show("{}", pieces.answer);
    last_ = pieces.answer.back();
  }
  flush_output();
}

void AnswerWriter::finish() {
  erase();
  if (last_ != '\n') show("\n");
  flush_output();
}

void AnswerWriter::draw() {
  constexpr std::chrono::milliseconds kBetween(100);
  ++tokens_;
  if (quiet_ || !can_erase(Channel::err) || Clock::now() - drawn_ < kBetween) return;
  drawn_ = Clock::now();
  tell("\r\x1b[Kthinking: {} tokens", tokens_);
  drawn_any_ = true;
}

void AnswerWriter::erase() {
  if (drawn_any_) tell("\r\x1b[K");
  drawn_any_ = false;
}

}  // namespace weft::tools
