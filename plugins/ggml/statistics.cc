// Implementation of statistics.h: counters of the whole process.
#include "statistics.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace weft_ggml {
namespace {

// The counter of one op. Its members are atomic, because backends of several contexts may compute at the same time.
struct Counter {
  std::atomic<const char*> name{nullptr};
  std::atomic<int64_t> ops{0}, tokens{0}, nanoseconds{0};
};

struct Counters {
  Counter of_op[8];

  Counter& find(const char* name) {
    Counter* counter = of_op;
    for (; counter != std::end(of_op) - 1; ++counter) {
      const char* none = nullptr;
      if (counter->name.compare_exchange_strong(none, name) || none == name) break;
    }
    return *counter;
  }

  ~Counters() {
    for (const Counter& counter : of_op)
      if (counter.name.load())
        std::fprintf(stderr, "weft: computed %s: %lld ops, %lld tokens, %.3f ms\n", counter.name.load(),
                     static_cast<long long>(counter.ops.load()), static_cast<long long>(counter.tokens.load()),
                     static_cast<double>(counter.nanoseconds.load()) * 1e-6);
  }
};

Counters& counters() {
  static Counters all;  // its destructor prints, at exit or when the plug-in is unloaded
  return all;
}

}  // namespace

bool statistics_wanted() {
  static const bool wanted = [] {
    const char* value = std::getenv("GGML_WEFT_STATS");
    return value && std::strcmp(value, "1") == 0;
  }();
  return wanted;
}

void tell(const char* sentence) { std::fprintf(stderr, "weft: %s\n", sentence); }

Measured::Measured(const Op& op, const ggml_tensor* node) : op_(op) {
  if (!statistics_wanted()) return;
  tokens_ = op.tokens(node);
  begun_ = std::chrono::steady_clock::now();
}

void Measured::done() {
  if (!statistics_wanted()) return;
  Counter& counter = counters().find(op_.name);
  const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - begun_;
  counter.ops.fetch_add(1);
  counter.tokens.fetch_add(tokens_);
  counter.nanoseconds.fetch_add(taken.count());
}

}  // namespace weft_ggml
