// Reads one golden file into the memory of a case.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cases/memory.h"
#include "files/safetensors.h"
#include "weft/delta_chunk.h"

namespace weft::cases {

class GoldenReader {
 public:
  GoldenReader(const std::string& file, Memory& memory);

  const std::string& op() const { return op_; }
  double tolerance() const { return tolerance_; }
  bool has(const std::string& name) const { return file_.tensors.contains(name); }
  std::vector<int64_t> shape(const std::string& name) const { return at(name).shape; }

  // A tensor of the file, converted to `dtype`; an absent tensor where the file has none of that name.
  Tensor floats(const std::string& name, DType dtype = DType::f32) const;
  Tensor indices(const std::string& name) const;  // i32
  // The bytes of a tensor, copied into a u8 tensor of the given shape.
  Tensor bytes(const std::string& name, const std::vector<int64_t>& shape) const;
  std::vector<double> numbers(const std::string& name) const;
  std::vector<int64_t> integers(const std::string& name) const;  // I64
  Sequences sequences() const;                                   // from cu_seqlens

  // Options of the case.
  bool given(const std::string& key) const { return args_.contains(key); }
  double number(const std::string& key) const;
  std::string text(const std::string& key, const std::string& fallback) const;
  bool flag(const std::string& key) const { return args_.value(key, false); }
  HeadMap head_map() const { return text("head_map", "grouped") == "tiled" ? HeadMap::tiled : HeadMap::grouped; }
  // Does the file say that the values of all these inputs are bf16 numbers?
  bool exact_in_bf16(std::initializer_list<const char*> names) const;

 private:
  const files::SafeTensor& at(const std::string& name) const;

  Memory& memory_;
  files::SafeTensors file_;
  nlohmann::json args_;
  std::string op_;
  double tolerance_ = 0;
};

// A view of a dense tensor with other sizes; the number of elements must be the same.
Tensor reshaped(const Tensor& tensor, std::initializer_list<int64_t> sizes);

}  // namespace weft::cases
