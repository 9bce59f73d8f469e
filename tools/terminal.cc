// Text for people: see terminal.h.
#include "tools/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "weft/printable.h"

namespace weft::tools {
namespace {

int descriptor(Channel channel) { return channel == Channel::out ? STDOUT_FILENO : STDERR_FILENO; }

bool dumb() {
  const char* term = std::getenv("TERM");
  return !term || std::strcmp(term, "dumb") == 0;
}

bool colours(Channel channel) {
  const char* no = std::getenv("NO_COLOR");
  return can_erase(channel) && !(no && *no);
}

int g_output_error = 0;  // the first

}  // namespace

bool is_terminal(Channel channel) { return isatty(descriptor(channel)) != 0; }

bool can_erase(Channel channel) { return is_terminal(channel) && !dumb(); }

size_t terminal_width() {
  constexpr long kFallback = 80, kLeast = 30;
  const char* columns = std::getenv("COLUMNS");
  long width = columns ? std::strtol(columns, nullptr, 10) : 0;
  winsize size{};
  if (width <= 0 && is_terminal(Channel::out) && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) width = size.ws_col;
  return static_cast<size_t>(width <= 0 ? kFallback : std::max(width, kLeast));
}

std::string terminal_safe(std::string_view text) {
  // Of CR LF, the line feed is enough.
  std::string lines(text);
  for (size_t at = 0; (at = lines.find("\r\n", at)) != std::string::npos;) lines.erase(at, 1);
  return printable_text(lines, "\n\t");
}

std::string one_line(std::string_view text) { return printable_text(text); }

void write_raw_text(Channel channel, std::string_view text) {
  std::FILE* const stream = channel == Channel::out ? stdout : stderr;
  if (std::fwrite(text.data(), 1, text.size(), stream) != text.size() && channel == Channel::out) remember_output_fault(errno);
}

void write_text(Channel channel, std::string_view text) { write_raw_text(channel, ready(channel, text)); }

std::string ready(Channel channel, std::string_view text) { return is_terminal(channel) ? terminal_safe(text) : std::string(text); }

std::string ready(Channel channel, const Painted& painted) {
  const std::string text = ready(channel, std::string_view(painted.text));
  if (!colours(channel)) return text;
  const Colour colour = painted.colour;
  const int code = colour == Colour::red ? 31 : colour == Colour::green ? 32 : colour == Colour::yellow ? 33 : 2;
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

void remember_output_fault(int error) {
  if (g_output_error == 0) g_output_error = error != 0 ? error : EIO;
}

bool output_fault_known() { return g_output_error != 0; }

void flush_output() {
  if (std::fflush(stdout) != 0) remember_output_fault(errno);
}

int output_fault() {
  flush_output();
  if (std::ferror(stdout)) remember_output_fault(EIO);
  return g_output_error;
}

Progress::Progress(size_t total) : total_(total), shown_(total > 0 && can_erase(Channel::err)) {}
Progress::~Progress() { clear(); }

void Progress::clear() {
  if (!shown_) return;
  tell("\r\x1b[K");
  std::fflush(stderr);
}

void Progress::step(const std::string& what) {
  if (shown_) draw(steps_ + 1, steps_, what);
  ++steps_;
}

void Progress::show(size_t done, const std::string& what) {
  constexpr std::chrono::milliseconds kBetween(100);
  if (shown_ && Clock::now() - drawn_ >= kBetween) draw(done, done, what);
}

void Progress::draw(size_t number, size_t done, const std::string& what) {
  constexpr size_t kWidth = 24, kText = 48;
  const size_t filled = number * kWidth / total_;
  drawn_ = Clock::now();
  const double elapsed = std::chrono::duration<double>(drawn_ - begin_).count();
  const std::string left =
      done > 0 ? fmt::format(", {:.0f} s left", elapsed / static_cast<double>(done) * static_cast<double>(total_ - done)) : "";
  tell("\r\x1b[K[{}{}] {}/{} {}{}", std::string(filled, '#'), std::string(kWidth - filled, ' '), number, total_,
       what.substr(0, kText), left);
  std::fflush(stderr);
}

Table::Table(std::vector<std::string> head, std::vector<bool> right) : right_(std::move(right)) {
  right_.resize(head.size(), false);
  lines_.push_back(std::move(head));
}

void Table::add(std::vector<std::string> cells) {
  cells.resize(lines_.front().size());
  lines_.push_back(std::move(cells));
}

std::vector<size_t> Table::widths() const {
  std::vector<size_t> widths(lines_.front().size(), 0);
  for (const auto& line : lines_)
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  return widths;
}

void Table::show() const {
  const std::vector<size_t> wide = widths();
  for (const auto& cells : lines_) {
    std::string line;
    for (size_t i = 0; i < cells.size(); ++i)
      line += fmt::format(fmt::runtime(right_[i] ? "{:>{}}  " : "{:<{}}  "), cells[i], wide[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    if (&cells == &lines_.front())
      tools::show("{}\n", coloured(Colour::dim, std::move(line)));
    else
      tools::show("{}\n", line);
  }
}

std::string Table::markdown() const {
  std::string out;
  for (const auto& cells : lines_) {
    out += "|";
    for (const std::string& cell : cells) out += " " + cell + " |";
    out += "\n";
    if (&cells != &lines_.front()) continue;
    out += "|";
    for (bool right : right_) out += right ? "---:|" : "---|";
    out += "\n";
  }
  return out;
}

std::string short_number(double value) {
  if (value == 0) return "0";
  const double size = std::abs(value);
  if (size >= 1000 && size < 1e9) return fmt::format("{:.0f}", value);
  return size >= 0.001 && size < 1000 ? fmt::format("{:.3g}", value) : fmt::format("{:.2e}", value);
}

std::string hex(uint64_t value) { return fmt::format("{:016x}", value); }

std::string printable(std::string_view text) {
  constexpr size_t kLongest = 160;
  std::string out;
  for (char c : text.substr(0, kLongest)) out += c >= 0x20 && c < 0x7f ? c : '?';
  if (text.size() > kLongest) out += "...";
  return out;
}

std::string in_quotes(std::string_view text) { return "'" + printable(text) + "'"; }

}  // namespace weft::tools
