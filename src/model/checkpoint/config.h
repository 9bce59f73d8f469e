// The configuration of a hybrid model from config.json and generation_config.json, checked, with all defaults filled in.
//
// Letters: H hidden size; Hq, Hk query and KV heads of the attention layers, D their head size; Hk, Hv, Dk, Dv key and value heads
// and head sizes of the gated delta layers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/delta_chunk.h"

namespace weft::model {

// The architectures that Weft runs. Qwen3.6 is qwen3_5 or qwen3_5_moe.
enum class Family { qwen3_next, qwen3_5, qwen3_5_moe };
const char* family_name(Family family);  // "qwen3_next"

enum class LayerKind : uint8_t { linear_attention, full_attention };
enum class FeedForward : uint8_t { dense, experts };

struct LayerConfig {
  LayerKind mixer = LayerKind::linear_attention;
  FeedForward feed_forward = FeedForward::dense;
};

// Rotary positions of a text. Channels j and j + n, j < n = frequencies.size(), are rotated by the angle position * frequencies[j],
// with cosine and sine multiplied by `factor`. Channels from 2 n on are unchanged. (Qwen3.5 gives every token three positions, t, h
// and w, which are equal for text.)
struct RopeConfig {
  std::vector<double> frequencies;  // frequencies[0] = 1 for the default type
  double factor = 1;                // 1 for the default type; others scale attention through it
  int64_t channels() const { return 2 * static_cast<int64_t>(frequencies.size()); }
};

// The defaults for sampling in generation_config.json. Absent members are not in the file.
struct GenerationConfig {
  std::optional<bool> do_sample;
  std::optional<double> temperature;         // >= 0
  std::optional<double> top_p;               // 0 < top_p <= 1
  std::optional<int64_t> top_k;              // >= 0, 0: all
  std::optional<double> repetition_penalty;  // 0.001 to 1000
  std::optional<int64_t> max_new_tokens;
};

struct ModelConfig {
  Family family = Family::qwen3_5;
  std::string model_type;  // as in the file: "qwen3_5_text"
  std::string identity;    // config.json as sorted JSON, without the fields that change when the file is rewritten

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;           // H
  std::vector<LayerConfig> layers;   // at least one
  int64_t prediction_layers = 0;     // of multi-token prediction, behind `layers` in a GGUF file; their tensors are ignored
  double rms_norm_eps = 1e-6;        // of every norm
  bool tie_word_embeddings = false;  // of the whole model: bind_weights() says what follows
  int64_t max_positions = 0;         // the context length of the model; 0: unknown

  // Attention layers.
  int64_t attention_heads = 0;  // Hq, a multiple of kv_heads
  int64_t kv_heads = 0;         // Hk
  int64_t head_dim = 0;         // D, not H / Hq; a multiple of 8, at most 512
  bool attention_bias = false;  // of q, k, v and o
  RopeConfig rope;

  // Gated delta layers.
  int64_t linear_key_heads = 0;         // Hk
  int64_t linear_value_heads = 0;       // Hv, a multiple of Hk
  int64_t linear_key_head_dim = 0;      // Dk
  int64_t linear_value_head_dim = 0;    // Dv
  int64_t conv_width = 0;               // W, 2 to 8
  HeadMap head_map = HeadMap::grouped;  // how value heads map to key heads

  // Feed-forward. The members of a kind that no layer has are 0. A layer with experts always has a shared expert too.
  int64_t intermediate_size = 0;
  int64_t experts = 0;
  int64_t experts_per_token = 0;  // 1 to experts
  int64_t expert_size = 0;
  int64_t shared_expert_size = 0;
  bool normalize_expert_weights = true;  // divide the chosen probabilities by their sum

  std::optional<int32_t> bos_id;
  std::vector<int32_t> eos_ids;  // of both files together, without repeats; below vocab_size
  GenerationConfig generation;

  int64_t linear_key_size() const { return linear_key_heads * linear_key_head_dim; }
  int64_t linear_value_size() const { return linear_value_heads * linear_value_head_dim; }
  int64_t conv_channels() const { return 2 * linear_key_size() + linear_value_size(); }  // [q | k | v]
  int64_t layers_of(LayerKind kind) const;
  bool is_eos(int32_t id) const;
};

// Reads directory/config.json and, if it exists, directory/generation_config.json. Throws weft::Error that names the file, the
// field, the value and what was wanted. Sizes are bounded (see config.cc) so that the bytes of all weights, in f32, fit into 63
// bits. No allocation depends on a size that a file claims, except one LayerConfig per layer (at most 1024).
ModelConfig read_config(const std::filesystem::path& directory);

// The same from the contents of the files. `generation` is absent where there is no generation_config.json.
ModelConfig parse_config(std::string_view config, std::optional<std::string_view> generation = {});

}  // namespace weft::model
