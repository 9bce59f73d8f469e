// Reads one golden file: see golden_reader.h.
#include "cases/golden_reader.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cases/golden.h"

namespace weft::cases {
namespace {

template <class T>
double number_at(std::span<const uint8_t> bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return static_cast<double>(value);
}

}  // namespace

const GoldenFile& golden_file(const std::string& name) {
  for (const GoldenFile& file : golden_files())
    if (name == file.name) return file;
  throw std::runtime_error("there is no golden file " + name);
}

GoldenReader::GoldenReader(const std::string& file, Memory& memory)
    : memory_(memory), file_(files::parse_safetensors(golden_file(file).bytes)) {
  args_ = nlohmann::json::parse(file_.metadata["args"]);
  op_ = file_.metadata["op"];
  tolerance_ = std::stod(file_.metadata["tolerance"]);
}

const files::SafeTensor& GoldenReader::at(const std::string& name) const {
  const auto found = file_.tensors.find(name);
  if (found == file_.tensors.end()) throw std::runtime_error("the golden file of " + op_ + " has no tensor " + name);
  return found->second;
}

std::vector<double> GoldenReader::numbers(const std::string& name) const {
  const files::SafeTensor& tensor = at(name);
  int64_t count = 1;
  for (int64_t size : tensor.shape) count *= size;
  std::vector<double> all;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    if (tensor.dtype == "F32") all.push_back(number_at<float>(tensor.bytes, i));
    if (tensor.dtype == "F64") all.push_back(number_at<double>(tensor.bytes, i));
    if (tensor.dtype == "I32") all.push_back(number_at<int32_t>(tensor.bytes, i));
    if (tensor.dtype == "U32") all.push_back(number_at<uint32_t>(tensor.bytes, i));
    if (tensor.dtype == "U8") all.push_back(number_at<uint8_t>(tensor.bytes, i));
  }
  if (static_cast<int64_t>(all.size()) != count)
    throw std::runtime_error("golden tensor " + name + " is of dtype " + std::string(tensor.dtype));
  return all;
}

std::vector<int64_t> GoldenReader::integers(const std::string& name) const {
  const files::SafeTensor& tensor = at(name);
  if (tensor.dtype != "I64") throw std::runtime_error("golden tensor " + name + " is of dtype " + std::string(tensor.dtype));
  std::vector<int64_t> all(tensor.bytes.size() / 8);
  std::memcpy(all.data(), tensor.bytes.data(), all.size() * 8);
  return all;
}

Tensor GoldenReader::floats(const std::string& name, DType dtype) const {
  if (!has(name)) return {};
  const Tensor tensor = memory_.make(dtype, at(name).shape);
  const std::vector<double> all = numbers(name);
  for (size_t i = 0; i < all.size(); ++i) set(tensor, static_cast<int64_t>(i), all[i]);
  return tensor;
}

Tensor GoldenReader::indices(const std::string& name) const {
  const std::vector<double> all = numbers(name);
  return memory_.indices(std::vector<int64_t>(all.begin(), all.end()));
}

Tensor GoldenReader::bytes(const std::string& name, const std::vector<int64_t>& shape) const {
  const Tensor tensor = memory_.make(DType::u8, shape);
  const std::span<const uint8_t> from = at(name).bytes;
  if (static_cast<int64_t>(from.size()) != tensor.elements())
    throw std::runtime_error("golden tensor " + name + " has " + std::to_string(from.size()) + " bytes");
  std::copy(from.begin(), from.end(), static_cast<uint8_t*>(tensor.data));
  return tensor;
}

Sequences GoldenReader::sequences() const {
  const std::vector<double> cu = numbers("cu_seqlens");
  int64_t longest = 0;
  for (size_t i = 1; i < cu.size(); ++i) longest = std::max(longest, static_cast<int64_t>(cu[i] - cu[i - 1]));
  return Sequences::packed(indices("cu_seqlens"), static_cast<int64_t>(cu.size()) - 1, longest);
}

double GoldenReader::number(const std::string& key) const { return args_.at(key).get<double>(); }

std::string GoldenReader::text(const std::string& key, const std::string& fallback) const { return args_.value(key, fallback); }

bool GoldenReader::exact_in_bf16(std::initializer_list<const char*> names) const {
  const std::string list = "," + text("bf16_exact", "") + ",";
  return std::all_of(names.begin(), names.end(),
                     [&](const char* name) { return list.find("," + std::string(name) + ",") != std::string::npos; });
}

Tensor reshaped(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  Tensor view = dense(tensor.data, tensor.dtype, sizes);
  if (view.elements() != tensor.elements()) throw std::runtime_error("reshaped: a golden tensor has another number of elements");
  return view;
}

}  // namespace weft::cases
