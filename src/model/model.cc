// A loaded model behind its public functions: see weft/model.h.
#include "weft/model.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>

#include "core/check.h"
#include "files/gguf.h"
#include "files/mapped_file.h"
#include "model/checkpoint/gguf_config.h"
#include "model/parts.h"
#include "model/state/kv_policy.h"
#include "model/tokenizer/tokenizer_file.h"

namespace weft {
namespace {

using model::LayerKind;
using model::ModelConfig;

[[noreturn]] void refuse(const char* op, const std::string& argument, const std::string& what) {
  throw Error(fail(Code::invalid_argument, op, argument, what));
}

int64_t parameters(const model::Checkpoint& checkpoint) {
  int64_t count = 0;
  for (const auto& [name, view] : checkpoint.tensors()) count += view.elements();
  return count;
}

[[noreturn]] void refuse_without_tokenizer(const Model::Parts& parts, const std::string& so) {
  if (files::is_gguf(parts.path)) refuse("model", parts.path.string(), "has no tokenizer, so " + so);
  refuse("model", (parts.path / "tokenizer.json").string(), "is missing, so " + so);
}

std::unique_ptr<Model::Parts> load_gguf(const std::filesystem::path& path, const ModelOptions& options) {
  files::GgufFiles file = files::open_gguf(path);
  ModelConfig config = model::read_gguf_config(file);
  std::optional<model::Tokenizer> tokenizer;
  if (model::has_gguf_tokenizer(file.fields)) tokenizer = model::Tokenizer::from_gguf(file.fields);
  if (tokenizer && tokenizer->size() > config.vocab_size)
    refuse("model", path.string(),
           "has token " + std::to_string(tokenizer->size() - 1) + ", token_embd.weight has " + std::to_string(config.vocab_size) +
               " rows");
  model::Checkpoint checkpoint = model::Checkpoint::from_gguf(std::move(file));
  model::Weights weights = model::bind_gguf_weights(checkpoint, config, options.most_copied_bytes);
  return std::unique_ptr<Model::Parts>(new Model::Parts{
      std::move(config), std::move(checkpoint), std::move(weights), std::move(tokenizer), path, options, {}, {}, {}, {}});
}

std::unique_ptr<Model::Parts> load_folder(const std::filesystem::path& directory, const ModelOptions& options) {
  ModelConfig config = model::read_config(directory);
  model::Checkpoint checkpoint = model::Checkpoint::open(directory);
  model::Weights weights = model::bind_weights(checkpoint, config, options.most_copied_bytes);
  auto parts = std::unique_ptr<Model::Parts>(
      new Model::Parts{std::move(config), std::move(checkpoint), std::move(weights), {}, directory, options, {}, {}, {}, {}});
  if (files::is_there(directory / "tokenizer.json")) {
    parts->tokenizer = model::Tokenizer::load(directory);
    if (parts->tokenizer->size() > parts->config.vocab_size)
      refuse("model", (directory / "tokenizer.json").string(),
             "has token " + std::to_string(parts->tokenizer->size() - 1) + ", config.json says vocab_size " +
                 std::to_string(parts->config.vocab_size));
  }
  return parts;
}

// The type that takes most bytes: "bf16".
std::string main_type(const model::Checkpoint& checkpoint) {
  std::map<std::string_view, int64_t> bytes;
  for (const auto& [name, view] : checkpoint.tensors()) bytes[view.dtype_text] += view.bytes;
  const auto most = std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::string text(most->first);
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

}  // namespace

Model::Model(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

Model Model::load(const std::filesystem::path& path, const ModelOptions& options) {
  return Model(files::is_gguf(path) ? load_gguf(path, options) : load_folder(path, options));
}

int64_t Model::vocab_size() const { return parts_->config.vocab_size; }
int64_t Model::max_positions() const { return parts_->config.max_positions; }
bool Model::ends(int32_t token) const { return parts_->config.is_eos(token); }
bool Model::has_tokenizer() const { return parts_->tokenizer.has_value(); }

std::optional<int32_t> Model::begin_token() const {
  const ModelConfig& c = parts_->config;
  if (c.bos_id || c.eos_ids.empty()) return c.bos_id;
  return c.eos_ids.front();
}

std::string Model::summary() const {
  const ModelConfig& c = parts_->config;
  char text[160];
  std::snprintf(text, sizeof text, "%s: %d gated delta + %d attention layers, %.1f M parameters, %s", c.model_type.c_str(),
                static_cast<int>(c.layers_of(LayerKind::linear_attention)),
                static_cast<int>(c.layers_of(LayerKind::full_attention)), static_cast<double>(parameters(parts_->checkpoint)) / 1e6,
                main_type(parts_->checkpoint).c_str());
  return text;
}

const std::vector<std::string>& Model::warnings() const { return parts_->weights.warnings; }

std::vector<int32_t> Model::encode(std::string_view text) const {
  if (!parts_->tokenizer) refuse_without_tokenizer(*parts_, "texts cannot be read");
  return parts_->tokenizer->encode(text);
}

std::string Model::decode(std::span<const int32_t> tokens) const {
  if (!parts_->tokenizer) refuse_without_tokenizer(*parts_, "texts cannot be written");
  return parts_->tokenizer->decode(tokens);
}

HybridPlan Model::plan(std::string_view kv, int64_t capacity, int64_t sequences, const Stream& stream) const {
  model::check_backend("model plan", stream);
  const ModelConfig& c = parts_->config;
  const std::vector<KvRecipe> recipes = model::parse_kv_policy(kv, c);
  HybridPlan plan;
  plan.sequences = sequences;
  plan.capacity = capacity;
  plan.place = stream.backend == Backend::cuda ? Place::cuda : Place::host;
  plan.device = stream.device;
  plan.model = fingerprint();
  auto recipe = recipes.begin();
  for (const model::LayerConfig& layer : c.layers) {
    if (layer.mixer == LayerKind::linear_attention)
      plan.layers.emplace_back(DeltaMemory{c.linear_value_heads, c.linear_value_head_dim, c.linear_key_head_dim, c.conv_channels(),
                                           c.conv_width, c.linear_key_heads, c.head_map});
    else
      plan.layers.emplace_back(plan.place == Place::cuda ? AttentionMemory::for_cuda(c.kv_heads, *recipe++)
                                                         : AttentionMemory::for_cpu(c.kv_heads, *recipe++));
  }
  if (Status status = validate(plan); !status) throw Error(std::move(status));
  return plan;
}

HybridState Model::create_state(std::string_view kv, int64_t capacity, int64_t sequences, const Stream& stream) const {
  return HybridState::create(plan(kv, capacity, sequences, stream));
}

ModelBytes Model::bytes(const Stream& stream, const HybridPlan& plan, int64_t context, int64_t prompt) const {
  if (context < 1) refuse("model bytes", "context", "is " + std::to_string(context) + ", wanted at least 1");
  if (prompt < 0 || prompt > context)
    refuse("model bytes", "prompt", "is " + std::to_string(prompt) + ", wanted 0 to the context of " + std::to_string(context));
  model::check_memory("model bytes", "plan", parts_->config, stream, plan);
  HybridPlan largest = plan;
  largest.capacity = std::max(plan.capacity, context);
  HybridState state = HybridState::pretend(largest);
  const bool on_device = stream.backend == Backend::cuda;
  const std::unique_ptr<model::Compute> compute =
      on_device ? model::cuda_compute(stream, nullptr, parts_->options.exact) : model::cpu_compute(stream);
  model::Workspace memory(true, compute->place(), stream.device);
  const auto run = [&](int64_t each, int64_t tokens) {
    std::vector<SequenceTokens> entries;
    for (int64_t n = 0; n * each < tokens; ++n) entries.push_back({n, std::min(each, tokens - n * each), each <= kMaxDecodeTokens});
    model::Step step{parts_->config, *compute, memory, state, state.append(entries)};
    // The last token of each sequence wants logits; a pretended step does not look where they would go.
    const std::vector<model::LogitRow> last(entries.size());
    model::run_step(step, parts_->weights, {}, last);
  };
  // The three steps that may need the most memory: a full prefill step that ends at the last token; the longest step with f32
  // operands, where longer steps have f16 operands; and one token of every sequence.
  const int64_t most = model::step_tokens(stream, parts_->config), chunk = std::min(prompt > 0 ? prompt : context, most);
  const auto fill = [&](int64_t sequence, int64_t tokens) { state.append(std::array{SequenceTokens{sequence, tokens}}); };
  const int64_t tokens = std::min(most, plan.sequences * chunk);
  const auto prefill = [&](int64_t each, int64_t all) {
    for (int64_t n = 0; n * each < all; ++n) fill(n, context - each);
    run(each, all);
    state.reset();
  };
  prefill(chunk, tokens);
  if (const int64_t exact = model::exact_tokens(parts_->config); on_device && exact > 0 && exact < tokens)
    prefill(std::min(chunk, exact), std::min(exact, tokens));
  for (int64_t n = 0; n < plan.sequences; ++n) fill(n, context - 1);
  run(1, std::min(plan.sequences, most));
  const int64_t copies = on_device ? 0 : parts_->checkpoint.copied_bytes() + parts_->weights.copied_bytes;
  return {weight_bytes(stream), hybrid_bytes(plan, context), memory.bytes() + compute->own_bytes(), copies};
}

int64_t Model::weight_bytes(const Stream& stream) const {
  if (stream.backend == Backend::cuda) return model::device_weight_bytes(parts_->config, parts_->weights, parts_->options.exact);
  return parts_->checkpoint.bytes() + parts_->checkpoint.copied_bytes() + parts_->weights.copied_bytes;
}

bool Model::on_device(const Stream& stream) const {
  if (stream.backend != Backend::cuda) return false;
  const std::lock_guard lock(parts_->mutex);
  return parts_->on_device.contains(stream.device);
}

GpuMemory gpu_memory(int device) {
  const model::DeviceMemory memory = model::device_memory(device);
  return {memory.free, memory.total, model::peak_device_bytes()};
}

namespace {

bool same_queue(const Stream& a, const Stream& b) { return a.backend == b.backend && a.device == b.device && a.queue == b.queue; }

// An idle runner of the stream, or a new one. Runners of the cpu are interchangeable; a runner of a device keeps the graphs of its
// stream.
std::unique_ptr<model::Runner> take_runner(Model::Parts& parts, const Stream& stream) {
  const std::lock_guard lock(parts.mutex);
  const bool on_device = stream.backend == Backend::cuda;
  for (auto& idle : parts.idle)
    if (on_device ? same_queue(idle->compute->stream(), stream) : idle->compute->place() == Place::host) {
      std::unique_ptr<model::Runner> runner = std::move(idle);
      parts.idle.erase(parts.idle.begin() + (&idle - parts.idle.data()));
      if (!on_device) runner->compute = model::cpu_compute(stream);
      return runner;
    }
  if (!on_device) return std::unique_ptr<model::Runner>(new model::Runner{model::Workspace(), model::cpu_compute(stream)});
  if (!parts.on_device.contains(stream.device))
    parts.on_device[stream.device] = model::upload_weights(stream, parts.config, parts.weights, parts.options.exact);
  const std::shared_ptr<const model::DeviceWeights>& weights = parts.on_device[stream.device];
  return std::unique_ptr<model::Runner>(new model::Runner{model::Workspace(false, Place::cuda, stream.device),
                                                          model::cuda_compute(stream, weights, parts.options.exact)});
}

}  // namespace

void Model::append(const Stream& stream, HybridState& state, std::span<const ModelInput> inputs, ModelTimes* times) const {
  model::check_owner("model append", *this, state);
  model::check_append("model append", parts_->config, stream, state, inputs);
  std::unique_ptr<model::Runner> runner = take_runner(*parts_, stream);
  model::append_tokens(parts_->config, parts_->weights, *runner->compute, runner->memory, state, inputs, times);
  const std::lock_guard lock(parts_->mutex);
  parts_->idle.push_back(std::move(runner));
  if (parts_->idle.size() <= Parts::kMostIdle) return;
  runner = std::move(parts_->idle.front());  // destroyed after the lock is released
  parts_->idle.erase(parts_->idle.begin());
}

int64_t Model::prefill(const Stream& stream, HybridState& state, int64_t sequence, std::span<const int32_t> tokens, float* logits,
                       PrefixStore& store, ModelTimes* times, const PromptCallback& on_step) const {
  if (tokens.empty()) refuse("model prefill", "tokens", "are none, wanted at least one");
  model::check_owner("model prefill", *this, state);
  const auto count = static_cast<int64_t>(tokens.size());
  ModelInput input{.sequence = sequence, .tokens = tokens, .logits = logits};
  model::check_append("model prefill", parts_->config, stream, state, {&input, 1}, true);
  // Every part of a prompt is computed as the whole prompt would be, even a part of 16 tokens or fewer.
  input.prompt_part = count > kMaxDecodeTokens;
  const int64_t restored = store.restore(state, sequence, tokens, count - 1), every = store.options().every;
  if (restored == 0) state.reset(sequence);
  // Steps of the size that append() would cut anyway, so that a callback can stop a long prompt.
  const int64_t most = model::step_tokens(stream, parts_->config);
  for (int64_t done = restored; done < count;) {
    const int64_t checkpoint = every > 0 ? std::min(count, (done / every + 1) * every) : count;
    const int64_t end = std::min(done + most, checkpoint);
    input.tokens = tokens.subspan(static_cast<size_t>(done), static_cast<size_t>(end - done));
    input.logits = end == count ? logits : nullptr;
    append(stream, state, {&input, 1}, times);
    done = end;
    if (done == checkpoint) store.insert(state, sequence, tokens.first(static_cast<size_t>(done)));
    if (on_step && !on_step(done, count)) break;
  }
  return restored;
}

}  // namespace weft
