// The tensors of a checkpoint, mapped into memory: a Hugging Face folder with one safetensors file or shards and an index, or a GGUF file.
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

#include "model/checkpoint/weight_type.h"
#include "weft/tensor.h"

namespace weft::files {
struct GgufFiles;
}

namespace weft::model {

// A dense row-major tensor of the checkpoint, in read-only memory. It is valid as long as the Checkpoint lives.
struct TensorView {
  std::optional<DType> dtype;      // absent for block types, and for types that Weft does not support (8-bit floats, f64, ...)
  std::optional<WeightType> type;  // absent for types that weights cannot have
  std::string_view dtype_text;     // as in the file: "BF16", "Q4_K"; a constant
  std::vector<int64_t> sizes;      // empty: a scalar
  const void* data = nullptr;  // not null, even for an empty tensor; aligned to its elements once Checkpoint::align() was called
  int64_t bytes = 0;

  int64_t elements() const;
};

// Movable; moving keeps every view valid.
class Checkpoint {
 public:
  // Opens directory/model.safetensors, or else directory/model.safetensors.index.json and the shards that it names. Throws
  // weft::Error for a missing file and for anything inconsistent: lengths, offsets, shapes, overlaps, repeated names, an index that
  // disagrees with its shards. The files must not be truncated while a Checkpoint is open.
  static Checkpoint open(const std::filesystem::path& directory);
  // Takes the tensors of a GGUF file and keeps its files mapped.
  static Checkpoint from_gguf(files::GgufFiles file);

  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  // Null if there is no such tensor.
  const TensorView* find(std::string_view name) const;
  // All names, sorted.
  std::vector<std::string> names() const;
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  // Bytes of all tensors.
  int64_t bytes() const;
  // Copies the tensor if it is misaligned in its file; otherwise it stays mapped. Throws Error, before it allocates, where the
  // copies of this checkpoint would take more than `most_copied` bytes.
  void align(std::string_view name, int64_t most_copied = INT64_MAX);
  // May tensors have block types, as in a GGUF file?
  bool has_blocks() const { return blocks_; }
  // Bytes of the copies that align() made.
  int64_t copied_bytes() const;

 private:
  struct Storage;  // the mapped files, and copies of misaligned tensors
  Checkpoint();

  std::unique_ptr<Storage> storage_;
  std::map<std::string, TensorView, std::less<>> tensors_;
  bool blocks_ = false;
};

}  // namespace weft::model
