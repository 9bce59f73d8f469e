// The header of a GGUF file that is written: metadata, and tensors with their places.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "files/gguf.h"

namespace weft::files {

class GgufOut {
 public:
  void set(std::string_view key, std::string_view value);
  void set(std::string_view key, const char* value) { set(key, std::string_view(value)); }
  void set(std::string_view key, uint32_t value);
  void set(std::string_view key, float value);
  void set(std::string_view key, bool value);
  void set(std::string_view key, const std::vector<std::string>& values);
  void set(std::string_view key, const std::vector<int32_t>& values);
  void set(std::string_view key, const std::vector<bool>& values);

  // A tensor of the sizes, rows first, behind those so far. Returns its place in the data.
  uint64_t add(std::string_view name, const std::vector<int64_t>& sizes, const GgufType& type);

  // Everything before the data, once all entries and tensors are there; the data begin right behind it.
  std::string header() const;
  uint64_t data_bytes() const { return data_bytes_; }  // of all tensors with their padding

 private:
  void key(std::string_view name, GgufKind kind);

  std::string entries_, tensors_;
  uint64_t entry_count_ = 0, tensor_count_ = 0, data_bytes_ = 0;
};

}  // namespace weft::files
