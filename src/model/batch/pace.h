// How many tokens of prompts a step may take, so that it ends in time: an estimate from the steps measured so far.
#pragma once

#include <cstdint>

namespace weft::model {

class Pace {
 public:
  // For steps of at most `most` tokens that take at most `seconds`.
  Pace(double seconds, int64_t most) : longest_(seconds), most_(most) {}

  // Tokens of prompts for a step beside `decoding` tokens: a multiple of 64, at least 64.
  int64_t prompt_tokens(int64_t decoding) const;
  // A step that took `seconds`.
  void measure(int64_t decoding, int64_t prompt, double seconds);

 private:
  double longest_;
  int64_t most_;
  int64_t last_ = 0;            // tokens of prompts in the latest step that had any, rounded up to a multiple of 64
  double seconds_a_token_ = 0;  // of steps with prompts, where tokens that decode count the same
};

}  // namespace weft::model
