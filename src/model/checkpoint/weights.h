// The weights of a hybrid model as the runner uses them, bound to the tensors of a checkpoint.
//
// Matrices stay in the mapped checkpoint. Small vectors are copied to f32. A Hugging Face checkpoint stores norm weights minus 1, except
// for the gated norm of the delta layers; the 1 is added here, and nowhere else. A GGUF file stores them with the 1, and -e^A_log in
// place of A_log.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/config.h"
#include "model/checkpoint/matrix.h"
#include "weft/tensor.h"

namespace weft::model {

// A linear projection whose outputs come from several matrices: the rows of a part give the outputs from `column` on. Packed
// matrices are sliced by the meaning of their rows, so the order of outputs does not depend on the order of rows in the file.
struct ProjectionPart {
  Matrix w;
  int64_t column = 0;
};
struct Projection {
  std::vector<ProjectionPart> parts;
  int64_t outputs = 0;
  std::vector<float> bias;  // [outputs], or empty
};

struct DeltaWeights {
  Projection input;                   // H -> [q | k | v | z | b | a], heads in order within each
  Tensor conv;                        // [C, W]
  std::vector<float> a_log, dt_bias;  // [Hv]
  Tensor norm;                        // [V], no 1 added
  Projection output;                  // Hv V -> H
  HeadMap head_map = HeadMap::grouped;
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
  Matrix head;                    // [vocab, H]; the embedding if they are tied

  int64_t copied_bytes = 0;           // bytes of the small vectors
  std::vector<std::string> warnings;  // contradictions in the files, as sentences
};

// Throws Error (operator "checkpoint") for a tensor that is missing, has another shape, has a dtype other than f32, f16 and bf16,
// or that the model does not use. Multi-token prediction ("mtp.") and vision ("visual.") tensors are ignored. The checkpoint must
// outlive the result.
//
// As in transformers, a head in the file is used even where config.json ties it to the embedding. If the two differ, there is a
// warning. Where they are tied and the file has only one of them, that one serves as both. Tensors that the model uses are aligned by
// copies of at most `most_copied` bytes.
Weights bind_weights(Checkpoint& checkpoint, const ModelConfig& config, int64_t most_copied);

// The same for the tensors of a GGUF file. Matrices may also have block types. The layers of multi-token prediction, which follow
// the layers of the config, are ignored.
Weights bind_gguf_weights(Checkpoint& checkpoint, const ModelConfig& config, int64_t most_copied);

}  // namespace weft::model
