// The metadata of a GGUF file from a Hugging Face folder: see parts.h.
#include <cmath>

#include "files/mapped_file.h"
#include "files/refuse.h"
#include "model/chat/parts.h"
#include "model/quantize/parts.h"
#include "model/tokenizer/byte_spelling.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/tokenizer_file.h"

namespace weft::model {
namespace {

namespace fs = std::filesystem;

uint32_t number(int64_t value) { return static_cast<uint32_t>(value); }

void set_rope(const fs::path& directory, const ModelConfig& c, const std::string& arch, files::GgufOut& out) {
  const std::vector<double>& frequencies = c.rope.frequencies;
  const auto channels = static_cast<double>(c.rope.channels());
  // Frequency 1 is theta^(-2 / channels), solved for theta.
  const double theta = frequencies.size() > 1 ? std::pow(frequencies[1], -channels / 2) : 10000;
  bool plain = c.rope.factor == 1;
  for (size_t j = 0; plain && j < frequencies.size(); ++j)
    plain = std::abs(frequencies[j] * std::pow(theta, 2.0 * static_cast<double>(j) / channels) - 1) < 1e-9;
  if (!plain)
    files::refuse((directory / "config.json").native(), "rope_parameters", "stretches the context, wanted rope_type 'default'");
  out.set(arch + ".rope.dimension_count", number(c.rope.channels()));
  out.set(arch + ".rope.freq_base", static_cast<float>(theta));
  // The sections share the frequencies among the three positions that a token of an image has. A text has three equal positions.
  const auto half = static_cast<int32_t>(frequencies.size());
  if (c.family != Family::qwen3_next)
    out.set(arch + ".rope.dimension_sections", std::vector<int32_t>{half - 2 * (half / 3), half / 3, half / 3, 0});
}

void set_config(const fs::path& directory, const ModelConfig& c, files::GgufOut& out) {
  const std::string arch = gguf_architecture(c.family), prefix = arch + ".";
  for (const LayerConfig& layer : c.layers)
    if ((layer.feed_forward == FeedForward::experts) != (c.family != Family::qwen3_5))
      files::refuse((directory / "config.json").native(), "mlp_only_layers",
                    "makes layers without experts, which the format cannot hold");
  if (!c.normalize_expert_weights)
    files::refuse((directory / "config.json").native(), "norm_topk_prob", "is false, which llama.cpp does not compute");
  const auto set = [&](const char* name, int64_t value) { out.set(prefix + name, number(value)); };
  out.set("general.architecture", arch);
  out.set("general.type", "model");
  const fs::path name = directory.lexically_normal();
  out.set("general.name", (name.has_filename() ? name : name.parent_path()).filename().string());
  out.set("general.quantization_version", uint32_t{2});
  set("block_count", static_cast<int64_t>(c.layers.size()));
  if (c.max_positions > UINT32_MAX)
    files::refuse((directory / "config.json").native(), "max_position_embeddings",
                  "is " + std::to_string(c.max_positions) + ", and the format has 32 bits for it");
  if (c.max_positions > 0) set("context_length", c.max_positions);
  set("embedding_length", c.hidden_size);
  if (c.intermediate_size > 0) set("feed_forward_length", c.intermediate_size);
  set("attention.head_count", c.attention_heads);
  set("attention.head_count_kv", c.kv_heads);
  set("attention.key_length", c.head_dim);
  set("attention.value_length", c.head_dim);
  out.set(prefix + "attention.layer_norm_rms_epsilon", static_cast<float>(c.rms_norm_eps));
  set_rope(directory, c, arch, out);
  if (c.experts > 0) {
    set("expert_count", c.experts);
    set("expert_used_count", c.experts_per_token);
    set("expert_feed_forward_length", c.expert_size);
    set("expert_shared_feed_forward_length", c.shared_expert_size);
  }
  set("ssm.conv_kernel", c.conv_width);
  set("ssm.state_size", c.linear_key_head_dim);
  set("ssm.group_count", c.linear_key_heads);
  set("ssm.time_step_rank", c.linear_value_heads);
  set("ssm.inner_size", c.linear_value_size());
  std::vector<bool> recurrent;
  for (const LayerConfig& layer : c.layers) recurrent.push_back(layer.mixer == LayerKind::linear_attention);
  out.set(prefix + "attention.recurrent_layers", recurrent);
  const GenerationConfig& g = c.generation;
  if (g.repetition_penalty) out.set("general.sampling.penalty_repeat", static_cast<float>(*g.repetition_penalty));
  if (g.do_sample.value_or(false)) {
    if (g.temperature) out.set("general.sampling.temp", static_cast<float>(*g.temperature));
    if (g.top_p) out.set("general.sampling.top_p", static_cast<float>(*g.top_p));
    if (g.top_k) out.set("general.sampling.top_k", number(*g.top_k));
  }
}

// The spelling of a token's bytes: the inverse of unspell().
std::string spell(std::string_view bytes) {
  std::string text;
  for (char c : bytes)
    for (int spelling = 0; spelling < kSpellings; ++spelling)
      if (kByteOf[static_cast<size_t>(spelling)] == static_cast<unsigned char>(c))
        append_utf8(text, static_cast<char32_t>(spelling));
  return text;
}

void set_tokenizer(const fs::path& path, const ModelConfig& c, files::GgufOut& out) {
  const TokenizerFile file = read_tokenizer_file(path);
  if (!file.nfc || file.ignore_merges)
    files::refuse(path.native(), file.nfc ? "model.ignore_merges" : "normalizer",
                  "is that of another kind of tokenizer, which the format cannot say");
  if (file.tokens.size() > c.vocab_size)
    files::refuse(path.native(), "", "has more tokens than vocab_size = " + std::to_string(c.vocab_size));
  std::vector<std::string> tokens(static_cast<size_t>(c.vocab_size));
  std::vector<int32_t> types(tokens.size(), 1);
  for (int32_t id = 0; id < static_cast<int32_t>(tokens.size()); ++id) {
    const auto at = static_cast<size_t>(id);
    tokens[at] = file.tokens.has(id) ? spell(file.tokens.bytes(id)) : "[PAD" + std::to_string(id) + "]";
    if (!file.tokens.has(id)) types[at] = 5;
  }
  std::vector<std::string> merges;
  for (const Merge& merge : file.merges)
    merges.push_back(tokens[static_cast<size_t>(merge.left)] + " " + tokens[static_cast<size_t>(merge.right)]);
  for (const AddedToken& token : file.added) {
    if (token.left_strip || token.right_strip || token.normalized)
      files::refuse(
          path.native(), "added_tokens",
          "has " + files::in_quotes(token.content) + ", which strips spaces or is normalised: the format cannot say that");
    tokens[static_cast<size_t>(token.id)] = token.content;
    types[static_cast<size_t>(token.id)] = token.special ? 3 : 4;
  }
  out.set("tokenizer.ggml.model", "gpt2");
  out.set("tokenizer.ggml.pre", file.split == SplitPattern::qwen2 ? "qwen2" : "qwen35");
  out.set("tokenizer.ggml.tokens", tokens);
  out.set("tokenizer.ggml.token_type", types);
  out.set("tokenizer.ggml.merges", merges);
  out.set("tokenizer.ggml.add_bos_token", false);
}

}  // namespace

const char* gguf_architecture(Family family) {
  switch (family) {
    case Family::qwen3_next: return "qwen3next";
    case Family::qwen3_5: return "qwen35";
    case Family::qwen3_5_moe: return "qwen35moe";
  }
  return "?";
}

void set_gguf_metadata(const fs::path& directory, const ModelConfig& c, files::GgufOut& out) {
  set_config(directory, c, out);
  if (const fs::path path = directory / "tokenizer.json"; files::is_there(path))
    set_tokenizer(path, c, out);
  else
    out.set("tokenizer.ggml.model", "none");
  if (c.bos_id) out.set("tokenizer.ggml.bos_token_id", number(*c.bos_id));
  constexpr const char* kEnds[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
  if (c.eos_ids.size() > std::size(kEnds))
    files::refuse(directory.native(), "eos_token_id",
                  "has " + std::to_string(c.eos_ids.size()) + " tokens, and the format holds " + std::to_string(std::size(kEnds)));
  for (size_t i = 0; i < c.eos_ids.size(); ++i) out.set(kEnds[i], number(c.eos_ids[i]));
  if (const std::optional<FoundTemplate> found = find_template(directory)) out.set("tokenizer.chat_template", found->program);
}

}  // namespace weft::model
