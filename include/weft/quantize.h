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
  // Called with the bytes written so far and the bytes of the whole file. If it returns false, quantize() stops and writes no file.
  std::function<bool(int64_t done, int64_t all)> on_progress = {};
};

struct QuantizeResult {
  int64_t bytes_before = 0, bytes_after = 0;  // bytes of all tensors of the checkpoint; bytes of the file
  int64_t tensors = 0;
  std::vector<std::string> warnings;  // Model::warnings() of the checkpoint
  bool stopped = false;               // on_progress stopped the work
};

// Reads a model in the format of Hugging Face and writes a GGUF file, atomically: a file of that name stays as it was until all is
// written. The name ends in .gguf. Throws Error with a sentence for what the format cannot hold and for weights that are not finite.
//
// Tensors that do not get the type `weights`: norms, convolutions, decay rates, biases and gates of shared experts are F32. Gates
// of the delta layers and routers keep the type of the checkpoint. The embedding and the head get `weights` where that is a float
// type, Q8_0 where it has fewer than 8 bits, and keep the type of the checkpoint with q8_0. A matrix whose rows are not whole
// blocks of the type gets Q8_0, or keeps the type of the checkpoint.
QuantizeResult quantize(const std::filesystem::path& directory, const std::filesystem::path& file,
                        const QuantizeOptions& options = {});

// The names that QuantizeOptions::weights takes.
std::vector<std::string> quantize_types();

}  // namespace weft
#pragma GCC visibility pop
