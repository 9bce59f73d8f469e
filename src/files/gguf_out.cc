// The header of a GGUF file that is written: see gguf_out.h.
#include "files/gguf_out.h"

namespace weft::files {
namespace {

constexpr uint64_t kAlignment = 32;  // the format's default
constexpr uint32_t kVersion = 3;

template <class T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
std::string text_of(std::string_view text) { return bytes_of<uint64_t>(text.size()) + std::string(text); }
uint64_t padded(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
std::string list_of(GgufKind kind, size_t size) { return bytes_of(static_cast<uint32_t>(kind)) + bytes_of<uint64_t>(size); }

}  // namespace

void GgufOut::key(std::string_view name, GgufKind kind) {
  entries_ += text_of(name) + bytes_of(static_cast<uint32_t>(kind));
  ++entry_count_;
}

void GgufOut::set(std::string_view name, std::string_view value) {
  key(name, GgufKind::text);
  entries_ += text_of(value);
}
void GgufOut::set(std::string_view name, uint32_t value) {
  key(name, GgufKind::u32);
  entries_ += bytes_of(value);
}
void GgufOut::set(std::string_view name, float value) {
  key(name, GgufKind::f32);
  entries_ += bytes_of(value);
}
void GgufOut::set(std::string_view name, bool value) {
  key(name, GgufKind::boolean);
  entries_ += bytes_of(value);
}
void GgufOut::set(std::string_view name, const std::vector<std::string>& values) {
  key(name, GgufKind::list);
  entries_ += list_of(GgufKind::text, values.size());
  for (const std::string& value : values) entries_ += text_of(value);
}
void GgufOut::set(std::string_view name, const std::vector<int32_t>& values) {
  key(name, GgufKind::list);
  entries_ += list_of(GgufKind::i32, values.size());
  for (int32_t value : values) entries_ += bytes_of(value);
}
void GgufOut::set(std::string_view name, const std::vector<bool>& values) {
  key(name, GgufKind::list);
  entries_ += list_of(GgufKind::boolean, values.size());
  for (bool value : values) entries_ += bytes_of(value);
}

uint64_t GgufOut::add(std::string_view name, const std::vector<int64_t>& sizes, const GgufType& type) {
  const uint64_t place = data_bytes_;
  tensors_ += text_of(name) + bytes_of(static_cast<uint32_t>(sizes.size()));
  int64_t count = 1;
  for (size_t i = sizes.size(); i-- > 0; count *= sizes[i]) tensors_ += bytes_of(sizes[i]);
  tensors_ += bytes_of(type.number) + bytes_of(place);
  ++tensor_count_;
  data_bytes_ = padded(place + static_cast<uint64_t>(count / type.block * type.bytes));
  return place;
}

std::string GgufOut::header() const {
  std::string all = "GGUF" + bytes_of(kVersion) + bytes_of(tensor_count_) + bytes_of(entry_count_) + entries_ + tensors_;
  all.resize(padded(all.size()));
  return all;
}

}  // namespace weft::files
