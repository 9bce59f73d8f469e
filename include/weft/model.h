// Running a hybrid language model: load a checkpoint, keep the memory of sequences, append tokens, read logits.
//
//   auto model = weft::Model::load("models/weft-11m");
//   auto state = model.create_state("8v4", 4096);
//   std::vector<int32_t> tokens = model.encode("It was a dark night, and");
//   std::vector<float> logits(static_cast<size_t>(model.vocab_size()));
//   model.append({}, state, {{.tokens = tokens, .logits = logits.data()}});
//
// weft/generate.h continues texts: it samples, stops, streams and drafts. weft/perplexity.h measures how well a model predicts a
// text.
//
// Link with weft_model. Every function throws weft::Error with a sentence.
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/device.h"
#include "weft/hybrid_state.h"
#include "weft/prefix_store.h"
#include "weft/state_file.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

// Tokens for one sequence of a state, and which logits to write: those after the last token, or those after every token.
struct ModelInput {
  int64_t sequence = 0;
  std::span<const int32_t> tokens;
  float* logits = nullptr;  // [vocab_size], or [tokens, vocab_size] with every_token; null: none
  bool every_token = false;
  // Receives the most probable token after the last one; null: not wanted. Of equal logits the first wins, +infinity is above all
  // numbers, and NaN never wins. On a GPU this alone costs no copy of the logits to the host.
  int32_t* best = nullptr;
  // The tokens are a part of a longer prompt, and are computed as they would be in one input with the rest of it. Without this
  // flag, an input of 16 tokens or fewer uses the decode path, and only such inputs can be rolled back.
  bool prompt_part = false;
};

// Where the time of steps went, in seconds.
struct ModelTimes {
  double dense = 0;   // matrix products
  double mixers = 0;  // Weft's ops: convolution, delta rule, KV codec, attention
  double other = 0;   // norms, rotary positions, activations
  // Steps that ran, and how many of them replayed a CUDA graph. A step whose capture fails runs without a graph and is counted; its
  // capture is tried again up to three times. `why` is the reason of the latest failure.
  int64_t steps = 0, replayed = 0, failed_captures = 0;
  std::string why;
  double total() const { return dense + mixers + other; }
};

// Bytes of running a model, known before anything is allocated. Weights and state are exact, scratch is an upper bound.
struct ModelBytes {
  int64_t weights = 0;  // tensors, mapped from the files, and the copies below
  HybridBytes state;
  int64_t scratch = 0;  // activations and the ops' scratch
  // Of `weights`, on the host: small vectors in f32, and tensors that do not lie aligned in their files. Mapped pages can be dropped
  // by the system, these cannot.
  int64_t copies = 0;
  int64_t total() const { return weights + state.total() + scratch; }
};

// How a model computes where there is a choice.
struct ModelOptions {
  // On a GPU, the operands of matrix products are f16. With `exact`, they are f32 numbers split into two f16 halves, and the gated
  // delta rule takes f32 inputs. Products then take twice the time, and prompts more than that. The cpu always computes in f32.
  bool exact = false;
  // Tensors that do not lie aligned in their file are copied. A checkpoint whose copies take more bytes than this is refused before
  // they are allocated.
  int64_t most_copied_bytes = INT64_MAX;
};

// Called after every step of a prompt with the tokens read so far and all that are to be read; false stops. Tokens that a prefix
// store restored count as read.
using PromptCallback = std::function<bool(int64_t done, int64_t all)>;

// A model is immutable once loaded. Several threads may call any member at the same time, each with a state of its own.
//
// On a GPU, steps are captured as CUDA graphs. If other code of the process synchronises the whole device during a capture
// (cudaDeviceSynchronize), CUDA may refuse that call and end the capture; the step then runs without a graph (see ModelTimes). A
// CUDA stream may be destroyed once the work that append() queued on it is done. A model keeps what it made for the sixteen streams
// used last.
class Model {
 public:
  // Reads a directory in the format of Hugging Face: config.json, the safetensors and, where there is one, tokenizer.json. Or reads a
  // GGUF file, of a split one its first part (NAME-00001-of-0000N.gguf): architectures qwen35, qwen35moe and qwen3next, weights in F32,
  // F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K. Families: Qwen3-Next, Qwen3.5 and Qwen3.6, dense and mixture of
  // experts, text part. A malformed file is refused, an optional one too.
  //
  // Weights are mapped, not copied, and stay mapped while the model lives; no other file is read again. Truncating a mapped
  // file ends the process (SIGBUS) when its weights are next read, and overwriting it changes the model. To replace a file, write
  // another one and rename it.
  static Model load(const std::filesystem::path& path, const ModelOptions& options = {});

  ~Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;

  int64_t vocab_size() const;
  int64_t max_positions() const;   // the context that the model was trained for; 0: unknown
  bool ends(int32_t token) const;  // is it an end-of-text token?
  std::optional<int32_t> begin_token()
      const;                    // begins a text that has no prompt: the model's BOS token, or else its first EOS token
  bool has_tokenizer() const;   // without one, encode() and decode() throw
  std::string summary() const;  // "qwen3_5_text: 6 gated delta + 2 attention layers, 10.5 M parameters, bf16"

  // Sentences about contradictions in the files that did not prevent loading, such as a head that config.json ties to an embedding
  // with other values. Callers show them to people.
  const std::vector<std::string>& warnings() const;

  // The tokens of a text. Where the text of a special token ("<|im_end|>") occurs in `text`, it becomes that token: callers that
  // encode untrusted text remove such texts first, or encode the parts between their own special tokens. Ill-formed UTF-8 becomes
  // U+FFFD.
  std::vector<int32_t> encode(std::string_view text) const;
  // The text of tokens. Special tokens give their texts; ids that the tokenizer lacks give nothing.
  std::string decode(std::span<const int32_t> tokens) const;

  // The memory plan, or the memory, of `sequences` sequences of up to `capacity` tokens. `kv` names the format of keys and values:
  // "f16", "8v4", or with exceptions by attention layer "8v4,0-1:f16" (see docs/formats.md).
  HybridPlan plan(std::string_view kv, int64_t capacity, int64_t sequences = 1, const Stream& stream = {}) const;
  HybridState create_state(std::string_view kv, int64_t capacity, int64_t sequences = 1, const Stream& stream = {}) const;
  // Bytes when all sequences of a plan hold `context` tokens, of which at most `prompt` came in one input (0: all of them may
  // have).
  ModelBytes bytes(const Stream& stream, const HybridPlan& plan, int64_t context, int64_t prompt = 0) const;
  // The first member of bytes() alone.
  int64_t weight_bytes(const Stream& stream) const;
  // Are the weights already on the GPU of this stream? The first append() puts them there.
  bool on_device(const Stream& stream) const;

  // Runs new tokens through the model and stores them in the state. A call takes any number of sequences, each at most once, with
  // any number of tokens; long inputs run in several steps. On the cpu, the results of a sequence do not depend on the other
  // sequences of the call. Keys and values of new tokens are encoded before attention, so new tokens see each other as later tokens
  // will see them. `times` accumulates the time spent.
  //
  // Arguments, the stream included, are checked before anything changes. A later failure (memory, device) leaves the sequences of
  // the call undefined: reset() them.
  void append(const Stream& stream, HybridState& state, std::span<const ModelInput> inputs, ModelTimes* times = nullptr) const;
  void append(const Stream& stream, HybridState& state, std::initializer_list<ModelInput> inputs,
              ModelTimes* times = nullptr) const {
    append(stream, state, std::span(inputs.begin(), inputs.size()), times);
  }

  // Makes a sequence hold exactly `tokens` (at least one), whatever it held, and writes the logits after the last token. The
  // longest beginning that the store has is restored; the rest is computed, and leaves checkpoints in the store at the multiples
  // that its options name and at the end. Returns the number of restored tokens.
  //
  // A store that another model filled is refused (HybridPlan::model). Results equal those of append() where a multiple of 64 tokens
  // was restored. Elsewhere they differ by rounding, and with a coded cache by more, because codes flip (docs/run-a-model.md). Errors
  // are those of append(); arguments are checked before the sequence is dropped.
  //
  // Where on_step stops, the sequence holds the tokens read so far. Before the last step, that leaves the logits unwritten.
  int64_t prefill(const Stream& stream, HybridState& state, int64_t sequence, std::span<const int32_t> tokens, float* logits,
                  PrefixStore& store, ModelTimes* times = nullptr, const PromptCallback& on_step = {}) const;

  // A hash of the configuration, of the names and shapes of all tensors, and of samples of their values: equal for equal models
  // only.
  std::string fingerprint() const;
  // A sequence to and from a file (weft/state_file.h). `ids` are the tokens of the sequence, followed by tokens that are still to
  // be appended; restore() returns them. `kv` is the policy that the state was made with, stored for people (StateLabel::kv). It is
  // compared with nothing; the formats themselves are compared. Throws Error for a file of another model, of other KV formats, or
  // damaged; the state is then unchanged. With a lock, no other writer comes between restore() and save().
  void save(const std::filesystem::path& file, const HybridState& state, int64_t sequence, std::span<const int32_t> ids,
            std::string_view kv = {}) const;
  void save(StateLock& lock, const HybridState& state, int64_t sequence, std::span<const int32_t> ids,
            std::string_view kv = {}) const;
  // A file of more than `most_ids` ids is refused too, for callers whose buffer holds no more.
  std::vector<int32_t> restore(const std::filesystem::path& file, HybridState& state, int64_t sequence,
                               int64_t most_ids = std::numeric_limits<int64_t>::max()) const;
  std::vector<int32_t> restore(StateLock& lock, HybridState& state, int64_t sequence,
                               int64_t most_ids = std::numeric_limits<int64_t>::max()) const;

  struct Parts;  // opaque: src/model/parts.h

 private:
  friend struct model::Access;
  explicit Model(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

// Memory of a GPU in bytes: free now, in total, and the peak that models and states of this process held on all GPUs together.
// Throws Error where the build or the machine has no such device.
struct GpuMemory {
  int64_t free = 0, total = 0, peak = 0;
};
GpuMemory gpu_memory(int device);

}  // namespace weft
#pragma GCC visibility pop
