// Prompts of `weft generate`: see prompt.h.
#include "tools/prompt.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "tools/terminal.h"
#include "tools/text_file.h"

namespace weft::tools {

std::string read_prompt(const std::string& file) {
  std::error_code ignored;  // the kind of file is asked before reading, because a named pipe may be gone afterwards
  const bool pipe = file == "-" || std::filesystem::is_fifo(file, ignored);
  std::string text = read_input(file, "the prompt");
  if (pipe && text.ends_with('\n')) text.resize(text.size() - (text.ends_with("\r\n") ? 2 : 1));
  return text;
}

std::optional<std::string> piped_prompt() {
  // nohup leaves a standard input that cannot be read.
  if (isatty(STDIN_FILENO) || (::fcntl(STDIN_FILENO, F_GETFL) & O_ACCMODE) == O_WRONLY) return std::nullopt;
  std::string text = read_prompt("-");
  if (text.empty()) return std::nullopt;
  return text;
}

bool is_short_prompt(const std::string& prompt) {
  constexpr std::ptrdiff_t kMostCharacters = 2000;
  const auto begins_character = [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80; };
  return std::count_if(prompt.begin(), prompt.end(), begins_character) <= kMostCharacters;
}

ReadingProgress::ReadingProgress(int64_t tokens, bool wanted) : all_(tokens) {
  if (wanted && can_erase(Channel::err)) drawer_ = std::thread([this] { draw_until_cleared(); });
}

void ReadingProgress::draw_until_cleared() {
  using namespace std::chrono_literals;
  std::unique_lock<std::mutex> locked(lock_);
  if (changed_.wait_for(locked, 1s, [this] { return cleared_; })) return;
  while (!cleared_) {
    const int64_t done = done_;
    const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    const double rate = static_cast<double>(done) / seconds;
    tell("\r\x1b[Kreading the prompt: {} of {} tokens", done, all_);
    if (done > 0)
      tell(", {:.0f} tokens/s, {:.0f} s left", rate, static_cast<double>(all_ - done) / rate);
    else
      tell(", {:.0f} s so far", seconds);
    std::fflush(stderr);
    changed_.wait_for(locked, 250ms, [this] { return cleared_; });
  }
  tell("\r\x1b[K");
  std::fflush(stderr);
}

void ReadingProgress::clear() {
  if (!drawer_.joinable()) return;
  {
    const std::lock_guard<std::mutex> locked(lock_);
    cleared_ = true;
  }
  changed_.notify_all();
  drawer_.join();
}

}  // namespace weft::tools
