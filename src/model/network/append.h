// Appending tokens to sequences, the function behind Model::append, and its checks.
#pragma once

#include <cstdint>
#include <span>

#include "model/network/network.h"
#include "weft/model.h"

namespace weft::model {

// Throws where no model runs on the stream's backend.
void check_backend(const char* op, const Stream& stream);

// Refuses a plan, or the plan of a state (`argument` says which), that does not fit the layers of this model or the place of the stream.
void check_memory(const char* op, const char* argument, const ModelConfig& config, const Stream& stream, const HybridPlan& plan);

// Long inputs are cut at multiples of this many tokens, where the delta rule continues with the same bits.
inline constexpr int64_t kCutTokens = kCheckpointUnit;

// Throws the Error that an append with these inputs would throw, before anything changes. `from_start`: as if the sequences were empty.
void check_append(const char* op, const ModelConfig& config, const Stream& stream, const HybridState& state,
                  std::span<const ModelInput> inputs, bool from_start = false);

// Model::append without its checks, with an observer of every step (null: none). check_append() comes first.
void append_tokens(const ModelConfig& config, const Weights& weights, Compute& compute, Workspace& memory, HybridState& state,
                   std::span<const ModelInput> inputs, ModelTimes* times, const Observer& observer = {});

}  // namespace weft::model
