// Makes the bytes of GGUF files, also of wrong ones.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "files/gguf.h"

namespace weft {

class GgufBytes {
 public:
  using Kind = files::GgufKind;

  template <class T>
  static std::string number(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }
  static std::string text(std::string_view value) { return number<uint64_t>(value.size()) + std::string(value); }

  // An entry of the metadata, its value as bytes.
  GgufBytes& entry(std::string_view key, Kind kind, const std::string& value) {
    entries_ += text(key) + number(static_cast<uint32_t>(kind)) + value;
    ++entry_count;
    return *this;
  }
  GgufBytes& set(std::string_view key, std::string_view value) { return entry(key, Kind::text, text(value)); }
  GgufBytes& set(std::string_view key, const char* value) { return set(key, std::string_view(value)); }
  GgufBytes& set(std::string_view key, uint32_t value) { return entry(key, Kind::u32, number(value)); }
  GgufBytes& set(std::string_view key, float value) { return entry(key, Kind::f32, number(value)); }
  GgufBytes& set(std::string_view key, bool value) { return entry(key, Kind::boolean, number(value)); }
  GgufBytes& list(std::string_view key, const std::vector<std::string>& values) {
    std::string bytes = number(static_cast<uint32_t>(Kind::text)) + number<uint64_t>(values.size());
    for (const std::string& value : values) bytes += text(value);
    return entry(key, Kind::list, bytes);
  }
  GgufBytes& list(std::string_view key, const std::vector<int32_t>& values) { return numbers(key, Kind::i32, values); }
  GgufBytes& list(std::string_view key, const std::vector<float>& values) { return numbers(key, Kind::f32, values); }

  // A tensor of the sizes, rows first, behind the tensors so far.
  GgufBytes& tensor(std::string_view name, const std::vector<int64_t>& sizes, std::string_view type, const std::string& data) {
    tensor_at(name, sizes, files::find_gguf_type(type)->number, data_.size());
    data_ += data;
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    return *this;
  }
  GgufBytes& tensor_at(std::string_view name, const std::vector<int64_t>& sizes, uint32_t type, uint64_t offset) {
    tensors_ += text(name) + number(static_cast<uint32_t>(sizes.size()));
    for (size_t i = sizes.size(); i-- > 0;) tensors_ += number(sizes[i]);
    tensors_ += number(type) + number(offset);
    ++tensor_count;
    return *this;
  }

  std::string bytes() const {
    std::string file = magic + number(version) + number(tensor_count) + number(entry_count) + entries_ + tensors_;
    if (data_.empty()) return file;
    file.resize((file.size() + alignment - 1) / alignment * alignment);
    return file + data_;
  }

  std::string magic = "GGUF";
  uint32_t version = 3;
  uint64_t tensor_count = 0, entry_count = 0, alignment = 32;

 private:
  template <class T>
  GgufBytes& numbers(std::string_view key, Kind kind, const std::vector<T>& values) {
    std::string bytes = number(static_cast<uint32_t>(kind)) + number<uint64_t>(values.size());
    for (T value : values) bytes += number(value);
    return entry(key, Kind::list, bytes);
  }
  std::string entries_, tensors_, data_;
};

}  // namespace weft
