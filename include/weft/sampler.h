// Choosing the next token of a text from logits.
//
// Let l[v] be the logit of token v. A call computes, in this order:
//
//   1. penalties    For every token v of the prompt or written: l[v] / repetition_penalty if l[v] > 0, else
//                   l[v] * repetition_penalty. For every token v written: l[v] - presence_penalty, and l[v] - frequency_penalty
//                   for every time that v was written. The first two apply once per token id, however often the token occurred.
//   2. temperature  p[v] is proportional to exp(l[v] / temperature). Temperature 0 chooses the token with the largest l, and no
//                   later rule applies.
//   3. top_k        keeps the top_k most probable tokens; 0 keeps all.
//   4. top_p        keeps, of what top_k left, the fewest most probable tokens whose share of the probability reaches top_p.
//   5. min_p        keeps, of what top_p left, the tokens with p[v] >= min_p * p[most probable].
//   6. draw         one of the tokens left, in proportion to p.
//
// Of equal logits the smaller token id counts as more probable.
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

struct Sampling {
  double temperature = 0.8;       // >= 0
  double top_p = 0.95;            // 0 < top_p <= 1; 1 keeps all
  int64_t top_k = 0;              // >= 0; 0 keeps all
  uint64_t seed = 0;              // of the draws
  double min_p = 0;               // 0 to 1; 0 keeps all
  double repetition_penalty = 1;  // 0.001 to 1000; 1 changes nothing, more than 1 makes repeated tokens less probable
  double presence_penalty = 0;    // -1000 to 1000; 0 changes nothing, more makes repeated tokens less probable
  double frequency_penalty = 0;   // the same for every time that a token was written
};

// The same seed, the same prompt and the same logits give the same tokens. Every call advances the random state and counts its
// token as written, so a sampler belongs to one sequence and to one thread at a time.
class Sampler {
 public:
  // Throws Error (operator "sampler") for a value outside of the ranges above.
  explicit Sampler(const Sampling& sampling);

  // Counts tokens as seen in the prompt.
  void see(std::span<const int32_t> prompt);
  // Chooses the next token. NaN and -infinity are never chosen; +infinity, the first of several, always is. Logits of nothing but
  // NaN and -infinity are refused with an Error.
  int32_t operator()(std::span<const float> logits);

 private:
  struct Candidate {
    float logit;
    int32_t token;
  };
  bool penalises() const {
    return sampling_.repetition_penalty != 1 || sampling_.presence_penalty != 0 || sampling_.frequency_penalty != 0;
  }
  std::span<const float> penalised(std::span<const float> logits);
  int32_t choose(std::span<const float> logits);

  Sampling sampling_;
  uint64_t state_;
  std::vector<Candidate> candidates_;
  std::unordered_map<int32_t, int64_t> seen_;  // token to how often it was written; empty without penalties
  std::vector<float> penalised_;
};

}  // namespace weft
#pragma GCC visibility pop
