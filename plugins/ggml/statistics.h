// Statistics of the plug-in, printed at exit where the environment has GGML_WEFT_STATS=1.
#pragma once

#include <chrono>

#include "engine.h"

namespace weft_ggml {

// Was GGML_WEFT_STATS=1 set when the plug-in was loaded?
bool statistics_wanted();

// Prints `sentence` on stderr at once.
void tell(const char* sentence);

// Counts one call of compute() from construction to done().
class Measured {
 public:
  Measured(const Op& op, const ggml_tensor* node);
  void done();

 private:
  const Op& op_;
  int64_t tokens_ = 0;
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace weft_ggml
