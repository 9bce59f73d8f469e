// Where the messages of a chat come from: a terminal with line editing and history, or a pipe with one message a line.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace weft::tools {

// One line after another.
class LineSource {
 public:
  enum class End { line, interrupted, finished };  // a line was read; Ctrl-C or a signal came; the input has ended
  struct Line {
    End end = End::finished;
    std::string text;      // without its line feed; with `interrupted`, the text typed before
    bool literal = false;  // a message even if it begins with a slash: several lines that were pasted at once, or a block
  };
  virtual ~LineSource() = default;
  virtual Line read(const std::string& prompt) = 0;
  virtual bool interactive() const = 0;
};

// Lines of standard input. On a terminal: libedit, with a history of this session, emacs keys and pasting of several lines. Without
// libedit or a capable terminal, the system edits the lines. Only one such object may exist at a time.
std::unique_ptr<LineSource> standard_input_lines();

// One message: a line; or lines that end with a backslash, and the line after them; or a block from """ to """. An unfinished
// message at the end of the input counts, too.
LineSource::Line read_message(LineSource& lines, const std::string& prompt);

}  // namespace weft::tools
