// Where the messages of a chat come from: a terminal with line editing and history, or a pipe with one message a line.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace weft::tools {

// One line after another.
class LineSource {
 public:
  enum class End { line, interrupted, finished };  // a line was read; Ctrl-C or a signal came; there are no more
  struct Line {
    End end = End::finished;
    std::string text;      // without its line feed; with `interrupted`, what was typed before
    bool literal = false;  // is a message whatever it begins with: several lines that were pasted at once, or a block
  };
  virtual ~LineSource() = default;
  virtual Line read(const std::string& prompt) = 0;
  virtual bool interactive() const = 0;
};

// Lines of standard input. On a terminal: libedit, with a history of this session, emacs keys and pasting of several lines. Where
// libedit or a capable terminal is missing, lines as the system edits them. Not more than one at a time.
std::unique_ptr<LineSource> standard_input_lines();

// One message: a line; lines that end with a backslash, and the one after them; or a block from """ to """. The part at an end of
// the input counts as a message.
LineSource::Line read_message(LineSource& lines, const std::string& prompt);

}  // namespace weft::tools
