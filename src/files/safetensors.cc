// A reader of the safetensors format for untrusted files: see safetensors.h.
#include "files/safetensors.h"

#include <algorithm>
#include <utility>

#include "files/json_text.h"
#include "files/refuse.h"

namespace weft::files {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit

// Parses one entry of the header. Messages name the file and the tensor.
class Entry {
 public:
  Entry(std::string_view file, const std::string& name) : file_(file), name_(name) {}

  SafeTensor parse(const Json& entry, std::span<const uint8_t> data) const {
    if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets"))
      fail("lacks dtype, shape or data_offsets");
    const Json &dtype = entry["dtype"], &shape = entry["shape"], &offsets = entry["data_offsets"];
    if (!dtype.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2)
      fail("has a dtype, shape or data_offsets of another type");
    SafeTensor tensor;
    tensor.dtype = dtype.get<std::string>();
    uint64_t bytes = static_cast<uint64_t>(safetensors_element_bytes(tensor.dtype));
    if (bytes == 0) fail("has the unknown dtype " + in_quotes(tensor.dtype));
    int64_t sizes = 1;  // product of the sizes that are not 0, so that no product of some of the sizes overflows
    for (const Json& size : shape) {
      tensor.shape.push_back(static_cast<int64_t>(whole_number(size)));
      if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(tensor.shape.back()), &bytes)) fail("is larger than 2^64 bytes");
      if (__builtin_mul_overflow(sizes, std::max<int64_t>(1, tensor.shape.back()), &sizes)) fail("has sizes beyond 2^63 elements");
    }
    const uint64_t begin = whole_number(offsets[0]), end = whole_number(offsets[1]);
    if (begin > end || end > data.size())
      fail("lies at " + std::to_string(begin) + " to " + std::to_string(end) + ", the data has " + std::to_string(data.size()) +
           " bytes");
    if (end - begin != bytes)
      fail("has " + std::to_string(end - begin) + " bytes, its shape and dtype need " + std::to_string(bytes));
    tensor.bytes = data.subspan(begin, bytes);
    return tensor;
  }

 private:
  uint64_t whole_number(const Json& value) const {
    if (!value.is_number_unsigned()) fail("has a size or offset that is not a whole number: " + json_text(value));
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(INT64_MAX)) fail("has a size or offset beyond 2^63");
    return number;
  }
  [[noreturn]] void fail(const std::string& what) const { refuse(file_, "tensor " + name_, what); }

  std::string_view file_;
  const std::string& name_;
};

// Every byte of the data must belong to exactly one tensor.
void check_ownership(const SafeTensors& all, std::span<const uint8_t> data, std::string_view file) {
  using Owner = std::pair<std::span<const uint8_t>, const std::string*>;
  std::vector<Owner> owners;
  for (const auto& [name, tensor] : all.tensors) owners.emplace_back(tensor.bytes, &name);
  std::sort(owners.begin(), owners.end(), [](const Owner& a, const Owner& b) {
    return a.first.data() != b.first.data() ? a.first.data() < b.first.data() : a.first.size() < b.first.size();
  });
  const uint8_t* at = data.data();
  const std::string* before = nullptr;
  for (const auto& [bytes, name] : owners) {
    if (bytes.data() < at) refuse(file, "tensor " + *name, "shares bytes with tensor " + in_quotes(*before));
    if (bytes.data() > at) refuse(file, "tensor " + *name, "lies behind bytes that no tensor owns");
    at += bytes.size();
    before = name;
  }
  if (at != data.data() + data.size()) refuse(file, "", "has bytes at its end that no tensor owns");
}

}  // namespace

int64_t safetensors_element_bytes(std::string_view dtype) {
  for (const auto& [bytes, names] : {std::pair{int64_t{1}, " BOOL U8 I8 F8_E4M3 F8_E5M2 "},
                                     {2, " F16 BF16 I16 U16 "},
                                     {4, " F32 I32 U32 "},
                                     {8, " F64 I64 U64 "}})
    if (!dtype.empty() && std::string_view(names).find(" " + std::string(dtype) + " ") != std::string_view::npos) return bytes;
  return 0;
}

SafeTensors parse_safetensors(std::span<const uint8_t> file, std::string_view name) {
  if (file.size() < 8) refuse(name, "", "has " + std::to_string(file.size()) + " bytes, wanted at least 8");
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= static_cast<uint64_t>(file[i]) << (8 * i);
  if (length > kMaxHeader || length > file.size() - 8)
    refuse(name, "", "has a header of " + std::to_string(length) + " bytes, the file has " + std::to_string(file.size()));
  const std::span<const uint8_t> text = file.subspan(8, length), data = file.subspan(8 + length);
  const Json header = parse_json_object({reinterpret_cast<const char*>(text.data()), text.size()}, std::string(name) + " (header)");
  SafeTensors all;
  for (const auto& [key, entry] : header.items()) {
    if (key != "__metadata__") {
      all.tensors[key] = Entry(name, key).parse(entry, data);
      continue;
    }
    if (!entry.is_object()) refuse(name, "__metadata__", "is " + json_text(entry) + ", wanted an object");
    for (const auto& [item, value] : entry.items()) {
      if (!value.is_string()) refuse(name, "__metadata__." + item, "is " + json_text(value) + ", wanted a string");
      all.metadata[item] = value.get<std::string>();
    }
  }
  check_ownership(all, data, name);
  return all;
}

}  // namespace weft::files
