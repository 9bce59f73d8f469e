// Binder: takes tensors of a checkpoint by name, checked, and remembers which ones were taken.
#pragma once

#include <functional>
#include <initializer_list>
#include <set>
#include <string>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/weights.h"

namespace weft::model {

class Binder {
 public:
  using Sizes = std::vector<int64_t>;

  Binder(Checkpoint& checkpoint, int64_t most_copied, int64_t& copied_bytes)
      : checkpoint_(checkpoint), most_copied_(most_copied), copied_bytes_(copied_bytes) {}

  bool has(const std::string& name) const { return checkpoint_.find(name) != nullptr; }
  // Members throw Error for a tensor that is missing, has other sizes, or another type. Matrices may have a block type; all other
  // tensors are f32, f16 or bf16.
  Matrix matrix(const std::string& name, int64_t rows, int64_t cols);
  // The matrices of a tensor [count, rows, cols], stacked to one matrix [count * rows, cols].
  Matrix matrices(const std::string& name, int64_t count, int64_t rows, int64_t cols);
  // A vector, or a matrix of one row, as a matrix of one row.
  Matrix row(const std::string& name, int64_t cols);
  // The matrix `name`.weight as a projection, with `name`.bias if asked.
  Projection linear(const std::string& name, int64_t outputs, int64_t inputs, bool bias = false);
  // A vector as an f32 copy, with `offset` added.
  std::vector<float> vector(const std::string& name, int64_t size, float offset);
  // A tensor that has sizes `wanted` in the file, as a read-only op input of sizes `sizes`.
  Tensor tensor(const std::string& name, const Sizes& wanted, std::initializer_list<int64_t> sizes);

  // Throws Error for a tensor that was not taken, unless `ignored` says that it belongs to a part of the model that Weft does not
  // run. `describer` names the source of the configuration, for the error: "config.json".
  void finish(const std::function<bool(const std::string&)>& ignored, const char* describer) const;

  [[noreturn]] static void refuse(const std::string& name, const std::string& what);

 private:
  const TensorView& take(const std::string& name, const Sizes& wanted, bool blocks);

  Checkpoint& checkpoint_;
  int64_t most_copied_;
  int64_t& copied_bytes_;
  std::set<std::string> used_;
};

// Appends the outputs of `part` to the outputs of `to`.
void append(Projection& to, const Projection& part);

}  // namespace weft::model
