// The parts that answer requests: the model with its tokenizer and template, the batcher, and the counters of the server.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "serve/request.h"
#include "serve/session_texts.h"
#include "weft/batcher.h"
#include "weft/chat.h"
#include "weft/tokenizer.h"

namespace weft::serve {

// Counts first tokens by the time until they came. Any thread may add.
class Histogram {
 public:
  static constexpr std::array kBounds{0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0};
  void add(double seconds);
  struct Counts {
    std::array<int64_t, kBounds.size() + 1> within{};  // not cumulative; the last entry counts times above every bound
    int64_t microseconds = 0;
  };
  Counts counts() const;

 private:
  std::array<std::atomic<int64_t>, kBounds.size() + 1> within_{};
  std::atomic<int64_t> microseconds_ = 0;
};

// All members outlive the requests.
struct Engine {
  const Model* model = nullptr;
  const Tokenizer* tokenizer = nullptr;
  const ChatTemplate* chat = nullptr;
  Batcher* batcher = nullptr;
  std::string name;         // of the model
  GenerateOptions options;  // the options that the model suggests
  std::function<void(std::function<void()>)> defer;
  SessionTexts sessions{size_t{64} << 20};
  Histogram first_token;

  RequestLimits limits() const { return {tokenizer->size(), batcher->options().sequences, batcher->options().capacity}; }
};

}  // namespace weft::serve
