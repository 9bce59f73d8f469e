// Text for people: colours and a progress bar where there is a terminal, tables everywhere.
//
// Everything that the command prints goes through show() or tell(). On a terminal they write control characters of their arguments
// as escapes such as \x1b, so that a file name, a prompt or a generated text cannot send commands to the terminal. Elsewhere the
// bytes stay as they are. The format string itself is written as it is.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace weft::tools {

enum class Colour { red, green, yellow, dim };

// A text in a colour: where it goes to a terminal, TERM is not dumb and NO_COLOR is not set.
struct Painted {
  Colour colour;
  std::string text;
};
inline Painted coloured(Colour colour, std::string text) { return {colour, std::move(text)}; }

enum class Channel { out, err };  // stdout and stderr

// Is the channel a terminal? And one that can move its cursor?
bool is_terminal(Channel channel);
bool can_erase(Channel channel);
// Columns of the terminal: COLUMNS where it is set, else what the terminal on stdout says, else 80.
size_t terminal_width();

// `text` with control characters, invisible marks that reorder text, and bytes that are not UTF-8 as \x1b or \xff. Line feeds and
// tabs stay, and a carriage return before a line feed is left out.
std::string terminal_safe(std::string_view text);
// The same on one line: for messages.
std::string one_line(std::string_view text);

// Writes text as it is. A failed write to stdout is kept for output_fault(); one to stderr is ignored, so that no result is lost
// because of a message.
void write_raw_text(Channel channel, std::string_view text);
// Writes a text from elsewhere: terminal_safe() where the channel is a terminal.
void write_text(Channel channel, std::string_view text);

// An argument of show() and tell() as it may be written.
std::string ready(Channel channel, const Painted& painted);
std::string ready(Channel channel, std::string_view text);
template <class Value>
decltype(auto) ready_value(Channel channel, const Value& value) {
  if constexpr (std::is_same_v<Value, Painted> || std::is_convertible_v<const Value&, std::string_view>)
    return ready(channel, value);
  else
    return (value);
}

// Writes to stdout, and to stderr.
template <class... Values>
void print_to(Channel channel, fmt::format_string<Values...> format, Values&&... values) {
  write_raw_text(channel, fmt::format(fmt::runtime(fmt::string_view(format)), ready_value(channel, values)...));
}
template <class... Values>
void show(fmt::format_string<Values...> format, Values&&... values) {
  print_to(Channel::out, format, std::forward<Values>(values)...);
}
template <class... Values>
void tell(fmt::format_string<Values...> format, Values&&... values) {
  print_to(Channel::err, format, std::forward<Values>(values)...);
}

// Flushes stdout. A failure does not throw; the first one is kept for output_fault().
void flush_output();
void remember_output_fault(int error);  // a value of errno
bool output_fault_known();
// Flushes, and returns the value of errno because of which printed text could not be written; 0 where all of it was.
int output_fault();

// A progress bar on stderr with an estimate of the time left, where stderr is a terminal; elsewhere silent. The destructor erases
// it.
class Progress {
 public:
  explicit Progress(size_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(const std::string& what);               // the next of `total` steps begins
  void show(size_t done, const std::string& what);  // `done` of `total` are done; drawn ten times a second at most
  void clear();                                     // erases the bar so that a line can be printed

 private:
  using Clock = std::chrono::steady_clock;
  void draw(size_t number, size_t done, const std::string& what);

  size_t total_, steps_ = 0;
  bool shown_;
  Clock::time_point begin_ = Clock::now(), drawn_{};
};

// Lines of cells in aligned columns; `right` says which columns are aligned to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> head, std::vector<bool> right = {});
  void add(std::vector<std::string> cells);
  void show() const;  // on stdout
  std::string markdown() const;

 private:
  std::vector<size_t> widths() const;
  std::vector<std::vector<std::string>> lines_;  // the first is the head
  std::vector<bool> right_;
};

// A number with at least three significant digits: "1.23e-06", "42.1", "12345".
std::string short_number(double value);
// Sixteen hexadecimal digits.
std::string hex(uint64_t value);
// Text from a file, for a report: bytes other than printable ASCII become '?', and long texts are cut. The second function adds
// quotes.
std::string printable(std::string_view text);
std::string in_quotes(std::string_view text);

}  // namespace weft::tools

template <>
struct fmt::formatter<weft::tools::Painted> : fmt::formatter<fmt::string_view> {
  template <class Context>
  auto format(const weft::tools::Painted& painted, Context& context) const {
    return fmt::formatter<fmt::string_view>::format(painted.text, context);
  }
};
