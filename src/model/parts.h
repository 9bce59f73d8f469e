// What a Model is made of, and one append with a look inside.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/config.h"
#include "model/checkpoint/weights.h"
#include "model/network/network.h"
#include "model/tokenizer/tokenizer.h"
#include "weft/model.h"

namespace weft {
namespace model {

// What appends one after another share: who computes, and buffers. Work that is on its way, for which `compute` waits at its end, still
// uses the buffers.
struct Runner {
  Workspace memory;
  std::unique_ptr<Compute> compute;
};

}  // namespace model

struct Model::Parts {
  model::ModelConfig config;
  model::Checkpoint checkpoint;
  model::Weights weights;
  std::optional<model::Tokenizer> tokenizer;
  std::filesystem::path directory;
  ModelOptions options;

  // Runners that no append is using, the longest idle first, at most so many: streams come and go, and a runner keeps memory for its own.
  // The weights on every device that was ever asked for, and the fingerprint once it was.
  static constexpr size_t kMostIdle = 16;
  std::mutex mutex;
  std::vector<std::unique_ptr<model::Runner>> idle;
  std::map<int, std::shared_ptr<const model::DeviceWeights>> on_device;
  std::string fingerprint;
};

namespace model {

// Refuses a state that says it is of another model.
void check_owner(const char* op, const Model& model, const HybridState& state);

// Refuses a plan, or that of a state (`argument` says which), that is not for the layers of this model where the stream computes.
void check_memory(const char* op, const char* argument, const ModelConfig& config, const Stream& stream, const HybridPlan& plan);

// The unit in which a long input is cut: at its multiples the delta rule continues bit for bit.
inline constexpr int64_t kCutTokens = kCheckpointUnit;

// Refuses, before anything changes, what an append would be refused for. `from_start`: as if the sequences held nothing.
void check_append(const char* op, const ModelConfig& config, const Stream& stream, const HybridState& state,
                  std::span<const ModelInput> inputs, bool from_start = false);

// Model::append with its parts named and an observer of every step (null: none), after check_append().
void append_tokens(const ModelConfig& config, const Weights& weights, Compute& compute, Workspace& memory, HybridState& state,
                   std::span<const ModelInput> inputs, ModelTimes* times, const Observer& observer = {});

}  // namespace model
}  // namespace weft
