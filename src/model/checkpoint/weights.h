// The weights of a hybrid model as the runner uses them: every tensor of a checkpoint found, checked and given its place.
//
// Matrices stay where the checkpoint has them. Small vectors are copied to f32; those of the norms that a checkpoint stores around
// zero (all but the gated norm of the delta layers) have their 1 added here, and nowhere else.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/config.h"
#include "model/network/cpu/dense.h"
#include "weft/delta_chunk.h"

namespace weft::model {

// A linear map whose outputs come from several matrices: rows of part i give the outputs from column `column` on. Packed matrices are
// cut into the rows of each meaning, so the order of outputs is ours, whatever the file's.
struct ProjectionPart {
  Matrix w;
  int64_t column = 0;
};
struct Projection {
  std::vector<ProjectionPart> parts;
  int64_t outputs = 0;
  std::vector<float> bias;  // [outputs], or empty
};

// How value heads find their key head in all models of these families.
inline constexpr HeadMap kHeadMap = HeadMap::grouped;

struct DeltaWeights {
  Projection input;                   // H -> [q | k | v | z | b | a], heads in order within each
  Tensor conv;                        // [C, W]
  std::vector<float> a_log, dt_bias;  // [Hv]
  Tensor norm;                        // [V], plain
  Projection output;                  // Hv V -> H
  HeadMap head_map = kHeadMap;
};

struct AttentionWeights {
  Projection input;                   // H -> [query and gate of each head in turn | k | v]
  std::vector<float> q_norm, k_norm;  // [D], 1 added
  Projection output;                  // Hq D -> H
};

struct SwigluWeights {
  Projection input;  // H -> [gate | up]
  Projection down;
};

struct ExpertWeights {
  Projection router;  // H -> experts
  std::vector<SwigluWeights> experts;
  SwigluWeights shared;
  Projection shared_gate;  // H -> 1
};

struct LayerWeights {
  std::vector<float> mixer_norm, feed_forward_norm;  // [H], 1 added
  std::variant<DeltaWeights, AttentionWeights> mixer;
  std::variant<SwigluWeights, ExpertWeights> feed_forward;
};

struct Weights {
  Matrix embedding;  // [vocab, H]
  std::vector<LayerWeights> layers;
  std::vector<float> final_norm;  // [H], 1 added
  Matrix head;                    // [vocab, H]; the embedding where they are tied

  int64_t copied_bytes = 0;  // of the small vectors
};

// Throws Error (operator "checkpoint") that names a tensor which is missing, has another shape or a dtype that is not f32, f16 or
// bf16, or which the model does not use. Multi-token prediction ("mtp.") and vision ("visual.") tensors are ignored. The checkpoint
// must outlive the result.
Weights bind_weights(const Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace weft::model
