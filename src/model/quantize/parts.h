// The parts of quantize(): which tensors a GGUF file has, and its metadata.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "files/gguf_out.h"
#include "model/checkpoint/config.h"
#include "model/checkpoint/weights.h"

namespace weft::model {

// A tensor to be written. fill(row, count, to) gives `count` rows from `row` on as f32; all sizes but the last are rows.
struct OutTensor {
  std::string name;
  std::vector<int64_t> sizes;
  WeightType type = WeightType::f32;
  std::function<void(int64_t row, int64_t count, float* to)> fill;

  int64_t cols() const { return sizes.back(); }
  int64_t rows() const;
};

// All tensors of a model with matrices of a type, named and ordered as llama.cpp's converter does. The arguments must outlive the
// result.
std::vector<OutTensor> gguf_tensors(const ModelConfig& config, const Weights& weights, WeightType type);

// All metadata of the file. Throws Error for a model that the format cannot describe.
void set_gguf_metadata(const std::filesystem::path& directory, const ModelConfig& config, files::GgufOut& out);

// The architecture's name in a GGUF file.
const char* gguf_architecture(Family family);

}  // namespace weft::model
