// Options that choose among tokens: see sampling_flags.h.
#include "tools/sampling_flags.h"

#include <fmt/format.h>

#include "tools/command.h"
#include "tools/validators.h"

namespace weft::tools {

void SamplingFlags::add_options(CLI::App& command) {
  command.add_option("--temperature", temperature, "0: always the most probable token; default: what the model suggests, or 0.8")
      ->check(number_in(0, 100));
  command.add_option("--top-p", top_p, "Only the most probable tokens that together have this probability; default 0.95")
      ->check(number_in(0, 1, /*above=*/true));
  command.add_option("--top-k", top_k, "Only this many of the most probable tokens; 0: all (default)")
      ->transform(whole_number_in(0, int64_t{1} << 30));
  command
      .add_option("--min-p", min_p,
                  "Only tokens with at least this share of the probability of the most probable one; 0: all (default)")
      ->check(number_in(0, 1));
  command
      .add_option("--repetition-penalty", repetition_penalty,
                  "Divide positive logits of tokens in the prompt and the text by this, multiply negative ones; 1: none; default: "
                  "what the model "
                  "suggests, or 1")
      ->check(number_in(0, 100, /*above=*/true));
  command
      .add_option("--presence-penalty", presence_penalty,
                  "Subtract this from the logits of tokens that were written; 0: nothing (default)")
      ->check(number_in(-100, 100));
  command
      .add_option("--frequency-penalty", frequency_penalty,
                  "Subtract this from the logit of a token for every time that it was written; 0: nothing (default)")
      ->check(number_in(-100, 100));
  command.add_option("--seed", seed, "Seed of the sampler: the same seed gives the same text; default 1")
      ->transform(whole_number());
}

void SamplingFlags::apply(Sampling& sampling) const {
  sampling.temperature = temperature.value_or(sampling.temperature);
  sampling.top_p = top_p.value_or(sampling.top_p);
  sampling.top_k = top_k.value_or(sampling.top_k);
  sampling.min_p = min_p.value_or(sampling.min_p);
  sampling.repetition_penalty = repetition_penalty.value_or(sampling.repetition_penalty);
  sampling.presence_penalty = presence_penalty;
  sampling.frequency_penalty = frequency_penalty;
  sampling.seed = chosen_seed();
}

uint64_t SamplingFlags::chosen_seed() const {
  constexpr uint64_t kDefaultSeed = 1;
  return seed.value_or(kDefaultSeed);
}

void SamplingFlags::refuse_idle(double chosen_temperature) const {
  if (chosen_temperature > 0) return;
  const char* const idle = top_p ? "--top-p" : top_k ? "--top-k" : min_p ? "--min-p" : seed ? "--seed" : nullptr;
  if (idle)
    throw UsageError(fmt::format("{} does nothing with temperature 0, which always takes the most probable token{}", idle,
                                 temperature ? "" : "; this model suggests it, so give --temperature too"));
}

}  // namespace weft::tools
