// What the subcommands that run a model share: options, memory checks and statistics.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tools/command.h"
#include "weft/chat.h"
#include "weft/model.h"

namespace weft::tools {

// --model, --kv, --memory, --threads, --isa, --backend, --exact.
struct ModelFlags {
  std::string model, kv = "8v4", backend = "cpu", isa = "best";
  int threads = 0;
  bool exact = false;
  int64_t memory = 0;  // the value of --memory, which was also given to limit_memory() (host_memory.h)

  // --model alone.
  static void add_model_option(CLI::App& command, std::string& model, const std::string& what);
  void add_options(CLI::App& command, bool with_kv = true);
  // The directory of --model, or that of the bundled model. Throws UsageError where the bundled model is not found.
  std::string directory() const;
  // Loads the model of directory() and prints its warnings to stderr.
  Model load() const;
  // The chat template of `file`, or else that of directory(), or else ChatTemplate::plain().
  ChatTemplate chat_template(const std::string& file) const;
  Stream stream() const;
  ModelOptions options() const;
};

// The model's memory plan. A KV policy that does not fit the model is a UsageError that names `option`.
HybridPlan plan_memory(const Model& model, const Stream& stream, const std::string& kv, int64_t capacity, int64_t sequences = 1,
                       const std::string& option = "--kv");
// The KV formats of --compare, or else the one of --kv. Throws UsageError for a format that does not fit the model.
std::vector<std::string> kv_policies(const Model& model, const Stream& stream, const std::string& kv,
                                     const std::vector<std::string>& compare);

// The tokens that a state must have room for.
struct MemoryNeed {
  int64_t tokens = 1;          // of each sequence, on the host (a device allocates the whole capacity at once)
  int64_t prompt = 0;          // most tokens of one input; 0: all tokens may come in one
  int64_t held = 0;            // bytes that the state has allocated already
  const char* lower = "--kv";  // options that lower the need, for the sentence
};
// Throws a sentence when memory does not suffice. A device needs free memory for the model and the state. The host needs available
// memory for the state and scratch; its weights are mapped files, whose pages the system can drop.
void check_memory(const Model& model, const Stream& stream, const HybridPlan& plan, const MemoryNeed& need);
// Bytes that can still be allocated on the stream's host or device. Absent where the system does not report them.
std::optional<int64_t> memory_for(const Stream& stream);
// What the weights of a model and one sequence take, and how much there is: "memory: weights 21.1 MB (mapped), state 1.65 MB + 784
// bytes per token; 20.1 GB available".
std::string memory_text(const Model& model, const Stream& stream, const std::string& kv);
// Makes a state by plan_memory(), after check_memory().
HybridState make_state(const Model& model, const Stream& stream, const std::string& kv, int64_t capacity, int64_t sequences,
                       int64_t rollback, const MemoryNeed& need);

// Waits for a state file for up to `seconds`, and says which process holds it. `proceed` as in StateLockOptions.
StateLockOptions wait_for_state(const std::string& file, double seconds, std::function<bool()> proceed = {});

// Bytes of one token in all KV caches of the model without compression.
int64_t f16_bytes_per_token(const Model& model);
int64_t peak_memory_bytes();  // largest resident memory of the process so far
// "on cuda (NVIDIA H200)": the backend and its device.
std::string where_text(const Stream& stream);
// "peak memory 1.05 GB", and that of the device where the stream has one.
std::string peak_text(const Stream& stream);

// "12.3 MB", "1.05 GB": decimal units.
std::string bytes_text(int64_t bytes);

// ": dense layers 61 %, mixers 30 %, the rest 9 %"; on a device ": 190 of 200 steps replayed".
std::string times_text(const Stream& stream, const ModelTimes& times, double seconds);

}  // namespace weft::tools
