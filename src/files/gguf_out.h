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

  // Adds a tensor of these sizes, rows first, behind the tensors so far. Returns its offset in the data.
  uint64_t add(std::string_view name, const std::vector<int64_t>& sizes, const GgufType& type);

  // All bytes before the data. Call it after the last entry and tensor; the data begin right behind these bytes.
  std::string header() const;
  uint64_t data_bytes() const { return data_bytes_; }  // bytes of all tensors with their padding

 private:
  void key(std::string_view name, GgufKind kind);

  std::string entries_, tensors_;
  uint64_t entry_count_ = 0, tensor_count_ = 0, data_bytes_ = 0;
};

}  // namespace weft::files
