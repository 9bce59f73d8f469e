// Options that choose among tokens, for the subcommands that write text.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>

#include "weft/sampler.h"

namespace weft::tools {

struct SamplingFlags {
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k;
  double presence_penalty = 0, frequency_penalty = 0;
  std::optional<uint64_t> seed;

  void add_options(CLI::App& command);
  // Replaces the model's suggestions by the options that were given.
  void apply(Sampling& sampling) const;
  uint64_t chosen_seed() const;
  // Throws UsageError for options that do nothing at temperature 0, which always takes the most probable token.
  void refuse_idle(double chosen_temperature) const;
};

}  // namespace weft::tools
