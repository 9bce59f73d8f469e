// Writes a model as a GGUF file: see weft/quantize.h.
#include "weft/quantize.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "cpu/runner-inl.h"
#include "files/file_lock.h"
#include "files/replaced_file.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/narrow.h"
#include "model/quantize/parts.h"

namespace weft {
namespace {

using model::OutTensor;
using model::WeightType;

constexpr const char* kOp = "quantize";
constexpr int64_t kChunk = 4 << 20;  // numbers that are quantised at a time

[[noreturn]] void refuse(const char* argument, const std::string& what) {
  throw Error(fail(Code::invalid_argument, kOp, argument, what));
}

const files::GgufType& gguf_type(WeightType type) {
  std::string name = model::weight_name(type);
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return *files::find_gguf_type(name);
}

// Writes the rows of a tensor at offset `place`. Returns false where `progress` stops the work.
bool write(const OutTensor& tensor, uint64_t place, const Stream& stream, files::ReplacedFile& file,
           const std::function<bool(int64_t)>& progress) {
  const int64_t cols = tensor.cols(), rows = tensor.rows(), row_bytes = model::weight_bytes(tensor.type, cols);
  const int64_t most = std::clamp<int64_t>(kChunk / cols, 1, rows);
  const bool wide = tensor.type == WeightType::f32 || tensor.type == WeightType::bf16;
  const float largest = wide ? std::numeric_limits<float>::max() : 65504;  // of f16, the type of scales
  std::vector<std::byte> out(static_cast<size_t>(most * row_bytes));
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(most, rows - row);
    std::atomic<bool> fits = true;
    const int threads = cpu::worth_threads(cpu::thread_count(stream), 100.0 * static_cast<double>(count * cols));
    cpu::parallel_for(threads, count, [&](int64_t i, int) {
      std::vector<float> values(static_cast<size_t>(cols));
      tensor.fill(row + i, 1, values.data());
      if (!std::all_of(values.begin(), values.end(), [&](float v) { return std::abs(v) <= largest; })) fits = false;
      model::narrow(tensor.type, values.data(), cols, out.data() + i * row_bytes);
    });
    if (!fits)
      refuse("directory", std::string("has a weight that is not finite or too large for ") + model::weight_name(tensor.type) +
                              ", in the tensor " + tensor.name);
    file.write(place + static_cast<uint64_t>(row * row_bytes), std::span(out).first(static_cast<size_t>(count * row_bytes)));
    if (!progress(count * row_bytes)) return false;
  }
  return true;
}

}  // namespace

std::vector<std::string> quantize_types() {
  std::vector<std::string> names;
  for (int i = 0; i < model::kWeightTypes; ++i) names.emplace_back(model::weight_name(static_cast<WeightType>(i)));
  return names;
}

QuantizeResult quantize(const std::filesystem::path& directory, const std::filesystem::path& file, const QuantizeOptions& options) {
  const std::optional<WeightType> type = model::find_weight_type(options.weights);
  if (!type) {
    std::string known;
    for (const std::string& name : quantize_types()) known += (known.empty() ? "" : ", ") + name;
    refuse("weights", "is '" + options.weights + "', wanted one of " + known);
  }
  // Otherwise a mistyped name could replace a file of the checkpoint.
  if (file.extension() != ".gguf") refuse("file", "is " + file.string() + ", wanted a name that ends in .gguf");
  const model::ModelConfig config = model::read_config(directory);
  model::Checkpoint checkpoint = model::Checkpoint::open(directory);
  const model::Weights weights = model::bind_weights(checkpoint, config, INT64_MAX);
  const std::vector<OutTensor> tensors = model::gguf_tensors(config, weights, *type);
  files::GgufOut out;
  model::set_gguf_metadata(directory, config, out);
  std::vector<uint64_t> places;
  for (const OutTensor& tensor : tensors) places.push_back(out.add(tensor.name, tensor.sizes, gguf_type(tensor.type)));

  files::FileLock lock(file);
  files::ReplacedFile replaced(lock);
  const std::string header = out.header();
  const uint64_t all = header.size() + out.data_bytes();
  replaced.write(0, std::as_bytes(std::span(header)));
  QuantizeResult result;
  result.bytes_before = checkpoint.bytes();
  result.bytes_after = static_cast<int64_t>(all);
  result.tensors = static_cast<int64_t>(tensors.size());
  result.warnings = weights.warnings;
  Stream stream;
  stream.threads = options.threads;
  auto done = static_cast<int64_t>(header.size());
  const auto progress = [&](int64_t bytes) {
    done += bytes;
    return !options.on_progress || options.on_progress(done, result.bytes_after);
  };
  for (size_t i = 0; i < tensors.size() && !result.stopped; ++i)
    result.stopped = !write(tensors[i], header.size() + places[i], stream, replaced, progress);
  if (result.stopped) return result;
  // The padding behind the last tensor.
  const uint64_t end = places.back() + static_cast<uint64_t>(tensors.back().rows() *
                                                             model::weight_bytes(tensors.back().type, tensors.back().cols()));
  const std::vector<std::byte> padding(static_cast<size_t>(out.data_bytes() - end));
  replaced.write(header.size() + end, padding);
  replaced.commit();
  return result;
}

}  // namespace weft
