// What the command says to people: colours and a progress bar where there is a terminal, tables everywhere.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace weft::tools {

enum class Colour { plain, red, green, yellow, dim };

// `text` in a colour, when stdout is a terminal and NO_COLOR is not set.
std::string coloured(Colour colour, const std::string& text);

// Says something on stderr. Where that cannot be written nobody hears it, and no result is lost for it: nothing is thrown.
void tell_text(const std::string& text);
template <class... Values>
void tell(fmt::format_string<Values...> format, Values&&... values) {
  tell_text(fmt::format(format, std::forward<Values>(values)...));
}

// Writes out what was printed to stdout. A failure stops nothing, but is remembered, with its reason, for output_fault().
void flush_output();
void remember_output_fault(int error);  // of errno
bool output_fault_known();
// Flushes, and says why something that was printed could not be written; empty when all was.
std::string output_fault();

// A progress bar on stderr with about the time that is left, when stderr is a terminal; otherwise silent. Erased when done.
class Progress {
 public:
  explicit Progress(size_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(const std::string& what);               // about to do the next of `total` things
  void show(size_t done, const std::string& what);  // so many of `total` are done; drawn ten times a second at most
  void clear();                                     // takes the bar away so that a line can be printed

 private:
  using Clock = std::chrono::steady_clock;
  void draw(size_t number, size_t done, const std::string& what);

  size_t total_, steps_ = 0;
  bool shown_;
  Clock::time_point begin_ = Clock::now(), drawn_{};
};

// Rows of cells as aligned columns. Columns of numbers go to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> head, std::vector<bool> right = {});
  void add(std::vector<std::string> cells);
  std::string text() const;
  std::string markdown() const;

 private:
  std::vector<size_t> widths() const;
  std::vector<std::vector<std::string>> rows_;
  std::vector<bool> right_;
};

// A number with at least three significant digits: "1.23e-06", "42.1", "12345".
std::string short_number(double value);

}  // namespace weft::tools
