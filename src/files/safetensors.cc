// A reader of the safetensors format for untrusted files: see safetensors.h.
#include "files/safetensors.h"

#include <algorithm>
#include <array>
#include <utility>

#include "files/json_walk.h"
#include "files/refuse.h"

namespace weft::files {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr size_t kMaxMetadata = 1 << 16;

struct DTypeName {
  std::string_view name;
  int64_t bytes;
};
constexpr std::array kDTypes{DTypeName{"BOOL", 1},    DTypeName{"U8", 1},  DTypeName{"I8", 1},   DTypeName{"F8_E4M3", 1},
                             DTypeName{"F8_E5M2", 1}, DTypeName{"F16", 2}, DTypeName{"BF16", 2}, DTypeName{"I16", 2},
                             DTypeName{"U16", 2},     DTypeName{"F32", 4}, DTypeName{"I32", 4},  DTypeName{"U32", 4},
                             DTypeName{"F64", 8},     DTypeName{"I64", 8}, DTypeName{"U64", 8}};

const DTypeName* find_dtype(std::string_view name) {
  const auto found = std::find_if(kDTypes.begin(), kDTypes.end(), [&](const DTypeName& known) { return known.name == name; });
  return found == kDTypes.end() ? nullptr : found;
}

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
    const DTypeName* known = find_dtype(dtype.get_ref<const std::string&>());
    if (!known) fail("has the unknown dtype " + in_quotes(dtype.get_ref<const std::string&>()));
    tensor.dtype = known->name;
    auto bytes = static_cast<uint64_t>(known->bytes);
    if (shape.size() > kMaxTensorSizes)
      fail("has " + std::to_string(shape.size()) + " sizes, wanted at most " + std::to_string(kMaxTensorSizes));
    tensor.shape.reserve(shape.size());
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

void parse_metadata(const JsonPart& part, std::string_view file, std::string_view header, SafeTensors& all) {
  if (!part.is(JsonPart::Kind::object)) refuse(file, "__metadata__", "is " + json_text(part) + ", wanted an object");
  part.members([&](std::string_view key, const JsonPart& value) {
    const std::string field = "__metadata__." + std::string(key);
    if (!value.is(JsonPart::Kind::string)) refuse(file, field, "is " + json_text(value) + ", wanted a string");
    if (!all.metadata.emplace(key, value.string()).second) refuse(header, "", "repeats the key " + in_quotes(key));
    if (all.metadata.size() > kMaxMetadata)
      refuse(file, "__metadata__", "has more than " + std::to_string(kMaxMetadata) + " entries, wanted at most that many");
  });
}

// Every byte of the data must belong to exactly one tensor.
void check_ownership(const SafeTensors& all, std::span<const uint8_t> data, std::string_view file) {
  using Owner = std::pair<std::span<const uint8_t>, const std::string*>;
  std::vector<Owner> owners;
  owners.reserve(all.tensors.size());
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
  const DTypeName* known = find_dtype(dtype);
  return known ? known->bytes : 0;
}

SafeTensors parse_safetensors(std::span<const uint8_t> file, std::string_view name) {
  if (file.size() < 8) refuse(name, "", "has " + std::to_string(file.size()) + " bytes, wanted at least 8");
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= static_cast<uint64_t>(file[i]) << (8 * i);
  if (length > kMaxHeader || length > file.size() - 8)
    refuse(name, "", "has a header of " + std::to_string(length) + " bytes, the file has " + std::to_string(file.size()));
  const std::span<const uint8_t> text = file.subspan(8, length), data = file.subspan(8 + length);
  const std::string header = std::string(name) + " (header)";
  SafeTensors all;
  bool has_metadata = false;
  const JsonPart root = check_json_object({reinterpret_cast<const char*>(text.data()), text.size()}, header);
  root.members([&](std::string_view key, const JsonPart& value) {
    if (key == "__metadata__") {
      if (std::exchange(has_metadata, true)) refuse(header, "", "repeats the key '__metadata__'");
      return parse_metadata(value, name, header, all);
    }
    const auto [place, fresh] = all.tensors.try_emplace(std::string(key));
    if (!fresh) refuse(header, "", "repeats the key " + in_quotes(key));
    if (all.tensors.size() > kMaxTensors)
      refuse(name, "", "has more than " + std::to_string(kMaxTensors) + " tensors, wanted at most that many");
    place->second = Entry(name, place->first).parse(value.tree(header), data);
  });
  check_ownership(all, data, name);
  return all;
}

}  // namespace weft::files
