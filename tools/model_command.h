// What the subcommands that run a model share: finding it, the stream, the KV format and statistics.
#pragma once

#include <memory>
#include <string>

#include "tools/command.h"
#include "weft/model.h"

namespace weft::tools {

// --model, --kv, --threads, --isa, --backend.
struct ModelFlags {
  std::string model, kv = "8v4", backend = "cpu", isa = "best";
  int threads = 0;
  bool exact = false;

  // --model alone.
  static void add_model_option(CLI::App& command, std::string& model, const std::string& what);
  void add_options(CLI::App& command, bool with_kv = true);
  // The directory asked for, or the model that comes with Weft. Throws UsageError when it is nowhere.
  std::string directory() const;
  Stream stream() const;
  ModelOptions options() const { return {exact}; }
};

// The model's memory plan; a policy that does not fit the model is a UsageError that names the option it came from.
HybridPlan plan_memory(const Model& model, const Stream& stream, const std::string& kv, int64_t capacity, int64_t sequences = 1,
                       const std::string& option = "--kv");
// The KV formats that --compare names, or else that of --kv. Throws UsageError for one that does not fit the model.
std::vector<std::string> kv_policies(const Model& model, const Stream& stream, const std::string& kv,
                                     const std::vector<std::string>& compare);

// What a state will be asked to hold.
struct MemoryNeed {
  int64_t tokens = 1;          // of each sequence, on the host (a device takes the memory of the whole capacity at once)
  int64_t prompt = 0;          // most tokens that come in one piece; 0: all of them may
  int64_t held = 0;            // bytes that a state of this plan has already
  const char* lower = "--kv";  // which options would make it less
};
// Throws a sentence when there is no room for that: on a device free memory for the model and the state; on the host, where weights are
// mapped and can be given back, available memory for the state and scratch.
void check_memory(const Model& model, const Stream& stream, const HybridPlan& plan, const MemoryNeed& need);
// A state by plan_memory(), after check_memory().
HybridState make_state(const Model& model, const Stream& stream, const std::string& kv, int64_t capacity, int64_t sequences,
                       int64_t rollback, const MemoryNeed& need);

// What one more token takes in all KV caches of the model when nothing is compressed.
int64_t f16_bytes_per_token(const Model& model);
int64_t peak_memory_bytes();  // of the process so far
// "on cuda (NVIDIA H200)": which backend computes, and on what.
std::string where_text(const Stream& stream);
// "peak memory 1.05 GB", of a device too where there is one.
std::string peak_text(const Stream& stream);

// The text of --file (or of standard input for "-").
std::string read_input(const std::string& file);

// "12.3 MB", "1.05 GB": decimal units.
std::string bytes_text(int64_t bytes);

// "dense layers 61 %, mixers 30 %, the rest 9 %"; on a device "190 of 200 steps replayed".
std::string times_text(const Stream& stream, const ModelTimes& times, double seconds);

}  // namespace weft::tools
