// A reader of the safetensors format: see safetensors.h.
#include "cases/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace weft::cases {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("safetensors: " + what); }

uint64_t element_bytes(const std::string& name, const std::string& dtype) {
  for (const auto& [bytes, names] : {std::pair{uint64_t{1}, " BOOL U8 I8 F8_E4M3 F8_E5M2 "},
                                     {2, " F16 BF16 I16 U16 "},
                                     {4, " F32 I32 U32 "},
                                     {8, " F64 I64 U64 "}})
    if (!dtype.empty() && std::string(names).find(" " + dtype + " ") != std::string::npos) return bytes;
  refuse("tensor " + name + " has the unknown dtype " + dtype);
}

uint64_t whole_number(const std::string& name, const json& value) {
  if (!value.is_number_unsigned()) refuse("tensor " + name + " has a size or offset that is not a whole number");
  const auto number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(INT64_MAX)) refuse("tensor " + name + " has a size or offset beyond 2^63");
  return number;
}

SafeTensor parse_tensor(const std::string& name, const json& entry, std::span<const uint8_t> data) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets"))
    refuse("tensor " + name + " lacks dtype, shape or data_offsets");
  const json &dtype = entry["dtype"], &shape = entry["shape"], &offsets = entry["data_offsets"];
  if (!dtype.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2)
    refuse("tensor " + name + " has a dtype, shape or data_offsets of another type");
  SafeTensor tensor;
  tensor.dtype = dtype.get<std::string>();
  uint64_t bytes = element_bytes(name, tensor.dtype);
  for (const json& size : shape) {
    tensor.shape.push_back(static_cast<int64_t>(whole_number(name, size)));
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(tensor.shape.back()), &bytes))
      refuse("tensor " + name + " is larger than 2^64 bytes");
  }
  const uint64_t begin = whole_number(name, offsets[0]), end = whole_number(name, offsets[1]);
  if (begin > end || end > data.size())
    refuse("tensor " + name + " lies at " + std::to_string(begin) + " to " + std::to_string(end) + ", the data has " +
           std::to_string(data.size()) + " bytes");
  if (end - begin != bytes)
    refuse("tensor " + name + " has " + std::to_string(end - begin) + " bytes, its shape and dtype want " + std::to_string(bytes));
  tensor.bytes = data.subspan(begin, bytes);
  return tensor;
}

}  // namespace

SafeTensors parse_safetensors(std::span<const uint8_t> file) {
  if (file.size() < 8) refuse("the file has " + std::to_string(file.size()) + " bytes, wanted at least 8");
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= static_cast<uint64_t>(file[i]) << (8 * i);
  if (length > kMaxHeader || length > file.size() - 8)
    refuse("the header has " + std::to_string(length) + " bytes, the file " + std::to_string(file.size()));
  const std::span<const uint8_t> text = file.subspan(8, length), data = file.subspan(8 + length);
  const json header = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) refuse("the header is not a JSON object");
  SafeTensors all;
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      all.tensors[name] = parse_tensor(name, entry, data);
      continue;
    }
    if (!entry.is_object()) refuse("__metadata__ is not an object");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) refuse("__metadata__ " + key + " is not a string");
      all.metadata[key] = value.get<std::string>();
    }
  }
  // Every byte of the data must belong to exactly one tensor.
  std::vector<std::span<const uint8_t>> ranges;
  for (const auto& [name, tensor] : all.tensors) ranges.push_back(tensor.bytes);
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return a.data() != b.data() ? a.data() < b.data() : a.size() < b.size(); });
  const uint8_t* at = data.data();
  for (const auto& range : ranges) {
    if (range.data() != at) refuse(range.data() < at ? "two tensors share bytes" : "there are bytes that no tensor owns");
    at += range.size();
  }
  if (at != data.data() + data.size()) refuse("there are bytes that no tensor owns");
  return all;
}

}  // namespace weft::cases
