// The tensors of a Hugging Face checkpoint: one safetensors file, or shards with an index, mapped into memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/tensor.h"

namespace weft::model {

// A dense row-major tensor of the checkpoint. It lives as long as the Checkpoint, and is read-only memory.
struct TensorView {
  std::optional<DType> dtype;  // absent for a type that Weft has no name for (8-bit floats, f64, ...)
  std::string dtype_text;      // as the file says: "BF16"
  std::vector<int64_t> sizes;  // empty: a scalar
  const void* data = nullptr;  // aligned to its element; not null, even for an empty tensor
  int64_t bytes = 0;

  int64_t elements() const;
};

// Movable; moving keeps every view valid.
class Checkpoint {
 public:
  // Opens directory/model.safetensors, or else directory/model.safetensors.index.json and the shards it names. Throws weft::Error with
  // a sentence for a missing file and for anything that does not fit: lengths, offsets, shapes, overlaps, repeated names, an index
  // that disagrees with its shards. The files must not be truncated while a Checkpoint is open.
  static Checkpoint open(const std::filesystem::path& directory);

  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  // Null when there is no such tensor.
  const TensorView* find(std::string_view name) const;
  // Every name, sorted.
  std::vector<std::string> names() const;
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  // Of all tensors together.
  int64_t bytes() const;

 private:
  struct Storage;  // the mappings, and copies of what a file holds at an odd address
  Checkpoint();

  std::unique_ptr<Storage> storage_;
  std::map<std::string, TensorView, std::less<>> tensors_;
};

}  // namespace weft::model
