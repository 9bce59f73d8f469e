// What a Model is made of, and one append with a look inside.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "model/checkpoint.h"
#include "model/config.h"
#include "model/network.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "weft/model.h"

namespace weft {

struct Model::Parts {
  model::ModelConfig config;
  model::Checkpoint checkpoint;
  model::Weights weights;
  std::optional<model::Tokenizer> tokenizer;
  std::filesystem::path directory;

  // Workspaces that no append is using, and the fingerprint once it was asked for.
  std::mutex mutex;
  std::vector<std::unique_ptr<model::Workspace>> idle;
  std::string fingerprint;
};

namespace model {

// Rows of activations that a step takes at most, and the unit in which a long input is cut: at multiples of 64 tokens the delta rule
// continues bit for bit.
inline constexpr int64_t kStepTokens = 512, kCutTokens = 64;

// Model::append with its workspace named and an observer of every step (null: none).
void append_tokens(const ModelConfig& config, const Weights& weights, const Stream& stream, Workspace& memory, HybridState& state,
                   std::span<const ModelInput> inputs, ModelTimes* times, const Observer& observer = {});

}  // namespace model
}  // namespace weft
