// How many tokens of prompts a step may take, so that it ends in time: an estimate from the steps measured so far.
#pragma once

#include <cstdint>

namespace weft::model {

class Pace {
 public:
  // Steps shall have at most `most` tokens and take at most `seconds`.
  Pace(double seconds, int64_t most) : longest_(seconds), most_(most) {}

  // How many prompt tokens a step may take beside `decoding` tokens: a multiple of 64, at least 64.
  int64_t prompt_tokens(int64_t decoding) const;
  // Records a step that took `seconds`.
  void measure(int64_t decoding, int64_t prompt, double seconds);

 private:
  double longest_;
  int64_t most_;
  int64_t last_ = 0;            // tokens of prompts in the latest step that had any, rounded up to a multiple of 64
  double seconds_a_token_ = 0;  // in steps with prompts; a prompt token and a decoding token count the same
};

}  // namespace weft::model
