// Writing a model as a GGUF file with weights of fewer bits.
//
//   weft::quantize("models/weft-11m", "weft-11m.gguf", {.weights = "q8_0"});
//
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

struct QuantizeOptions {
  // f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k or q6_k: the type of the matrices of layers.
  std::string weights = "q8_0";
  int threads = 0;  // 0: one per processor
  // Called with the bytes of the file that are done and all; false stops, and leaves nothing behind.
  std::function<bool(int64_t done, int64_t all)> on_progress = {};
};

struct QuantizeResult {
  int64_t bytes_before = 0, bytes_after = 0;  // of all tensors, and of the file
  int64_t tensors = 0;
  std::vector<std::string> warnings;  // of the checkpoint: Model::warnings()
  bool stopped = false;               // by on_progress
};

// Reads a model in the format of Hugging Face and writes a GGUF file, atomically: a file of that name stays as it was until all is
// written. The name ends in .gguf. Throws Error with a sentence for what the format cannot hold and for weights that are not finite.
//
// What stays in more bits than `weights`: norms, convolutions, decay rates, biases (F32); gates of the delta layers, routers and gates
// of shared experts (the type of the checkpoint); the embedding and the head (the type of the checkpoint where `weights` has 8 bits, else
// Q8_0). A matrix whose rows are not whole blocks of the type gets Q8_0, or the type of the checkpoint.
QuantizeResult quantize(const std::filesystem::path& directory, const std::filesystem::path& file,
                        const QuantizeOptions& options = {});

// The names that QuantizeOptions::weights takes.
std::vector<std::string> quantize_types();

}  // namespace weft
#pragma GCC visibility pop
