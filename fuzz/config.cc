// Arbitrary bytes as config.json and, after a byte 0xFF, generation_config.json: a consistent configuration, or a weft::Error.
#include "model/checkpoint/config.h"

#include <cstdlib>
#include <optional>
#include <string_view>

#include "weft/status.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  const size_t cut = std::min(all.find('\xFF'), size);
  try {
    std::optional<std::string_view> generation;
    if (cut < size) generation = all.substr(cut + 1);
    const weft::model::ModelConfig config = weft::model::parse_config(all.substr(0, cut), generation);
    require(!config.layers.empty() && config.hidden_size > 0 && config.vocab_size > 0);
    require(config.attention_heads % config.kv_heads == 0 && config.linear_value_heads % config.linear_key_heads == 0);
    require(config.rope.channels() > 0 && config.rope.channels() <= config.head_dim);
    for (double frequency : config.rope.frequencies) require(frequency > 0 && frequency <= 1);
    for (const weft::model::LayerConfig& layer : config.layers)
      require(layer.feed_forward == weft::model::FeedForward::dense
                  ? config.intermediate_size > 0
                  : config.experts_per_token > 0 && config.experts_per_token <= config.experts && config.expert_size > 0);
    for (int32_t id : config.eos_ids) require(id >= 0 && id < config.vocab_size);
  } catch (const weft::Error& error) {
    require(std::string_view(error.what()).find("config.json") != std::string_view::npos);
  }
  return 0;
}
