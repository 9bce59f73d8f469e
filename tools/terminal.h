// Text for people: colours and a progress bar where there is a terminal, tables everywhere.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft::tools {

enum class Colour { plain, red, green, yellow, dim };

// `text` in a colour where stdout is a terminal and NO_COLOR is not set.
std::string coloured(Colour colour, const std::string& text);

// Writes to stderr. A failed write is ignored, so that no result is lost because of a message.
void tell_text(const std::string& text);
template <class... Values>
void tell(fmt::format_string<Values...> format, Values&&... values) {
  tell_text(fmt::format(format, std::forward<Values>(values)...));
}

// Flushes stdout. A failure does not throw; the first one is kept for output_fault().
void flush_output();
void remember_output_fault(int error);  // a value of errno
bool output_fault_known();
// Flushes, and returns the reason why printed text could not be written; empty where all of it was.
std::string output_fault();

// A progress bar on stderr with an estimate of the time left, where stderr is a terminal; elsewhere silent. The destructor erases
// it.
class Progress {
 public:
  explicit Progress(size_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(const std::string& what);               // the next of `total` things begins
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
  std::string text() const;
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
// Text from a file, safe for a terminal: bytes other than printable ASCII become '?', and long texts are cut. And the same in
// quotes.
std::string printable(std::string_view text);
std::string in_quotes(std::string_view text);

}  // namespace weft::tools
