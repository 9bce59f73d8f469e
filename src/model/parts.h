// Private members of Model: configuration, weights, tokenizer, idle runners.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "model/access.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/config.h"
#include "model/checkpoint/weights.h"
#include "model/network/append.h"
#include "model/network/network.h"
#include "model/tokenizer/tokenizer.h"
#include "weft/model.h"

namespace weft {
namespace model {

// What successive appends on one stream share: a Compute and its buffers. Queued work may still use the buffers; the destructor of
// `compute` waits for that work.
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
  std::filesystem::path path;  // as given to load()
  ModelOptions options;

  // Runners that no append uses, the longest idle first. A runner holds memory for its stream, and streams come and go, so the
  // model keeps at most kMostIdle of them.
  static constexpr size_t kMostIdle = 16;
  std::mutex mutex;  // of all members below
  std::vector<std::unique_ptr<model::Runner>> idle;
  std::map<int, std::shared_ptr<const model::DeviceWeights>> on_device;  // by device, once a step ran there
  std::string fingerprint;                                               // empty until it is first needed
};

namespace model {

// Refuses a state whose plan names another model.
void check_owner(const char* op, const Model& model, const HybridState& state);

}  // namespace model
}  // namespace weft
