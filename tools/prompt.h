// The prompts of `weft generate`: their sources, and the progress that is shown while the model reads a prompt.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace weft::tools {

// The prompt in a file. Of standard input ("-") one line feed at the end is left out, because `echo` and people add one.
std::string read_prompt(const std::string& file);

// The prompt that is piped to a command without --prompt and --file: standard input, where that is neither a terminal nor empty.
std::optional<std::string> piped_prompt();

// Is the prompt short enough to be repeated before its continuation?
bool is_short_prompt(const std::string& prompt);

// A line on stderr while the model reads a prompt: tokens, rate and time left. It appears after a second, where stderr is a
// terminal, and clear() or the destructor erases it. A thread draws it, because one step of a large model takes long.
class ReadingProgress {
 public:
  ReadingProgress(int64_t tokens, bool wanted);
  ~ReadingProgress() { clear(); }
  ReadingProgress(const ReadingProgress&) = delete;
  ReadingProgress& operator=(const ReadingProgress&) = delete;
  void done(int64_t tokens) { done_ = tokens; }
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  void draw_until_cleared();

  const int64_t all_;
  const Clock::time_point begin_ = Clock::now();
  std::atomic<int64_t> done_ = 0;
  std::mutex lock_;
  std::condition_variable changed_;
  bool cleared_ = false;  // under lock_
  std::thread drawer_;
};

}  // namespace weft::tools
