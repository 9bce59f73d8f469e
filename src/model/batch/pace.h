// How many tokens of prompts a step may take, so that it ends in time: an estimate from the steps measured so far.
#pragma once

#include <cstdint>

namespace weft::model {

class Pace {
 public:
  // Steps of at most `most` tokens, which shall take no longer than `seconds`.
  Pace(double seconds, int64_t most) : longest_(seconds), most_(most) {}

  // Tokens of prompts for a step beside `decoding` tokens: a multiple of 64, at least 64.
  int64_t prompt_tokens(int64_t decoding) const;
  void measure(int64_t decoding, int64_t prompt, double seconds);

 private:
  double decode_seconds(int64_t decoding) const;

  double longest_;
  int64_t most_;
  int64_t last_ = 0;            // tokens of prompts in the latest step that had any
  int64_t decoded_ = 0;         // tokens of the latest step without prompts,
  double decode_ = 0;           // and its seconds
  double seconds_a_token_ = 0;  // of prompts
};

}  // namespace weft::model
