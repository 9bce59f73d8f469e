// Running a hybrid language model: load a checkpoint, keep the memory of sequences, append tokens, read logits, sample.
//
//   auto model = weft::Model::load("models/weft-11m");
//   auto state = model.create_state("8v4", 4096);
//   std::vector<int32_t> tokens = model.encode("It was a dark night, and");
//   std::vector<float> logits(static_cast<size_t>(model.vocab_size()));
//   weft::Sampler sampler({.temperature = 0.8, .top_p = 0.95, .seed = 1});
//   for (int i = 0; i < 100; ++i) {
//     model.append({}, state, {{.tokens = tokens, .logits = logits.data()}});
//     tokens = {sampler(logits)};
//   }
//
// Link with weft_model. Everything throws weft::Error with a sentence.
// ABI: relink C++ callers between minor versions; weft/c.h is the stable interface.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/device.h"
#include "weft/hybrid_state.h"
#include "weft/prefix_store.h"
#include "weft/state_file.h"

namespace weft {

// Tokens for one sequence of a state, and the logits to be written: after the last token, or after every one.
struct ModelInput {
  int64_t sequence = 0;
  std::span<const int32_t> tokens;
  float* logits = nullptr;  // [vocab_size], or [tokens, vocab_size] with every_token; null: none wanted
  bool every_token = false;
  // The most probable token after the last one, the first of equal ones, +infinity before all numbers and NaN never; all that leaves a
  // device without logits.
  int32_t* best = nullptr;
  // The tokens are part of a longer prompt: computed as in one input with the rest, though they be 16 or fewer, which alone are decoded
  // and can be taken back.
  bool prompt_part = false;
};

// Where time went, in seconds.
struct ModelTimes {
  double dense = 0;   // matrix products
  double mixers = 0;  // Weft's ops: convolution, delta rule, KV codec, attention
  double other = 0;   // norms, rotary positions, activations
  // Steps that were run, and of those on a GPU that replayed a captured graph. A capture that fails is counted and tried again, up to
  // three times; its step runs without. `why` is the reason of the latest.
  int64_t steps = 0, replayed = 0, failed_captures = 0;
  std::string why;
  double total() const { return dense + mixers + other; }
};

// Bytes of running a model, known before anything is allocated: of weights and states exactly, of scratch the most.
struct ModelBytes {
  int64_t weights = 0;  // mapped from the files, plus copies of small vectors
  HybridBytes state;
  int64_t scratch = 0;  // activations and the ops' scratch
  int64_t total() const { return weights + state.total() + scratch; }
};

// How a model computes where there is a choice.
struct ModelOptions {
  // On a GPU, what enters a product is f16. Exact: it is f32 cut into two f16 numbers, and the gated delta rule is computed in f32, token by
  // token. Products take twice the time then and prompts more; on the cpu everything is f32 anyway.
  bool exact = false;
};

// Immutable once loaded; every member may be called from several threads, for different states. On a GPU steps are captured as graphs; when
// something outside of Weft waits for the whole device meanwhile (cudaDeviceSynchronize), CUDA may refuse it and end the capture: the step
// then runs without a graph (see ModelTimes). A stream may end once all that append() asked of it is done; what
// was made for the sixteen used last is kept.
class Model {
 public:
  // Reads config.json, the safetensors (mapped, not copied) and, where there is one, tokenizer.json of a directory in the format of
  // Hugging Face: Qwen3-Next, Qwen3.5 and Qwen3.6, dense and mixture of experts, text part. A file that is there and cannot be right is
  // refused, an optional one too. Of all files but the safetensors nothing is read again later; those stay mapped: one that is cut while
  // the model lives ends the process (SIGBUS) when its weights are next read, and one that is overwritten in place changes the model. To
  // replace a file, write another one and rename it.
  static Model load(const std::filesystem::path& directory, const ModelOptions& options = {});

  ~Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;

  int64_t vocab_size() const;
  int64_t max_positions() const;   // the context that the model was made for; 0: unknown
  bool ends(int32_t token) const;  // is it an end-of-text token?
  std::string summary() const;     // "qwen3_5_text: 6 gated delta + 2 attention layers, 10.5 M parameters, bf16"

  // Where the text of a special token ("<|im_end|>") stands in `text`, it becomes that token: whoever encodes words of strangers takes such
  // texts out first, or encodes the parts between its own tokens. Bytes that are no UTF-8 become U+FFFD.
  std::vector<int32_t> encode(std::string_view text) const;
  // Special tokens with their texts; ids that the tokenizer does not have are left out.
  std::string decode(std::span<const int32_t> tokens) const;

  // The memory of `sequences` sequences of up to `capacity` tokens. `kv` names the format of keys and values: "f16", "8v4", or with
  // exceptions by attention layer "8v4,0-1:f16" (see docs/model.md).
  HybridPlan plan(std::string_view kv, int64_t capacity, int64_t sequences = 1, const Stream& stream = {}) const;
  HybridState create_state(std::string_view kv, int64_t capacity, int64_t sequences = 1, const Stream& stream = {}) const;
  // Bytes when all sequences of a plan hold `context` tokens, of which at most `prompt` came in one input (0: all of them may have).
  ModelBytes bytes(const Stream& stream, const HybridPlan& plan, int64_t context, int64_t prompt = 0) const;

  // Runs new tokens through the model and remembers them in the state. Any number of sequences, each at most once, with any number of
  // tokens; a long input is taken in chunks. On the cpu a sequence's numbers do not depend on the other sequences of the call. Keys and
  // values of new tokens are encoded first, so tokens see each other as later ones will see them. `times` gains the time spent.
  // Arguments, the stream's among them, are checked before anything changes. What fails later (memory, a device) leaves the sequences of
  // the call undefined: reset() them.
  void append(const Stream& stream, HybridState& state, std::span<const ModelInput> inputs, ModelTimes* times = nullptr) const;
  void append(const Stream& stream, HybridState& state, std::initializer_list<ModelInput> inputs,
              ModelTimes* times = nullptr) const {
    append(stream, state, std::span(inputs.begin(), inputs.size()), times);
  }

  // Makes a sequence, whatever it held, that of `tokens` (at least one), with the logits after the last: restored from the store as far as
  // that knows its beginning, read from there on, and checkpoints left at the multiples and the end that the store's options say. Returns
  // how many tokens were restored. A store that another model filled is refused (where plans name their models: HybridPlan::model).
  // Numbers are those of append() where it restored a multiple of 64 tokens; elsewhere the difference is rounding. Errors are those of
  // append(): arguments are checked before the sequence is given up.
  int64_t prefill(const Stream& stream, HybridState& state, int64_t sequence, std::span<const int32_t> tokens, float* logits,
                  PrefixStore& store, ModelTimes* times = nullptr) const;

  // Of the configuration, the names and shapes of all tensors and samples of their numbers: equal for equal models only.
  std::string fingerprint() const;
  // A sequence to and from a file (weft/state_file.h). `ids` are its tokens, and behind those the ones that are still to be appended;
  // restore returns them. `kv` is the policy that the state was made with, in words for whoever reads the file (StateLabel::kv): it is
  // compared with nothing, the formats themselves are. Throws Error for a file of another model, of other KV formats, or damaged; the
  // state is then as it was.
  void save(const std::filesystem::path& file, const HybridState& state, int64_t sequence, std::span<const int32_t> ids,
            std::string_view kv = {}) const;
  std::vector<int32_t> restore(const std::filesystem::path& file, HybridState& state, int64_t sequence) const;

  struct Parts;  // config, weights and tokenizer: src/model/parts.h
  const Parts& parts() const { return *parts_; }

 private:
  explicit Model(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

// How the next token is chosen: the top_k most probable ones (0: all), of those the fewest whose probabilities at the temperature sum
// up to top_p, one of those by chance. Temperature 0 takes the most probable.
struct Sampling {
  double temperature = 0.8;
  double top_p = 0.95;
  int64_t top_k = 0;
  uint64_t seed = 0;
};

// The same seed and the same logits give the same tokens. Every call moves on what the seed began, so a sampler is of one thread at a time;
// give every sequence its own.
class Sampler {
 public:
  // Throws Error for a temperature below 0, a top_p outside (0, 1] or a top_k below 0.
  explicit Sampler(const Sampling& sampling);
  // The next token. NaN and -infinity are never chosen, +infinity (the first of several) always; logits of nothing but NaN and -infinity
  // are refused with an Error.
  int32_t operator()(std::span<const float> logits);

 private:
  Sampling sampling_;
  uint64_t state_;
  struct Candidate {
    float logit;
    int32_t token;
  };
  std::vector<Candidate> candidates_;
};

}  // namespace weft
