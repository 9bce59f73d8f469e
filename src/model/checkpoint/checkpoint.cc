// The tensors of a Hugging Face checkpoint: see checkpoint.h.
#include "model/checkpoint/checkpoint.h"

#include <cstring>
#include <set>

#include "files/json_text.h"
#include "files/mapped_file.h"
#include "files/refuse.h"
#include "files/safetensors.h"

namespace weft::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr uint64_t kMaxIndex = 64 << 20;
constexpr size_t kMaxShards = 4096;

std::optional<DType> dtype_of(std::string_view text) {
  if (text == "F32") return DType::f32;
  if (text == "F16") return DType::f16;
  if (text == "BF16") return DType::bf16;
  if (text == "I32") return DType::i32;
  if (text == "I64") return DType::i64;
  if (text == "U8") return DType::u8;
  if (text == "U32") return DType::u32;
  return std::nullopt;
}

// Reads which shard holds which tensor. Shard names have no directory part, so that an index cannot name files elsewhere.
std::map<std::string, std::string> read_index(const fs::path& path) {
  const files::Json index = files::parse_json_object(files::read_text(path, kMaxIndex), path.native());
  const files::JsonFields fields(index, path.native());
  if (!fields.object("weight_map")) fields.fail("weight_map", "is missing, wanted the shard of every tensor");
  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  for (const auto& [name, shard] : index["weight_map"].items()) {
    const std::string field = "weight_map." + name;
    if (!shard.is_string()) fields.fail(field, "is " + files::json_text(shard) + ", wanted the name of a file");
    const std::string& file = shard.get_ref<const std::string&>();
    if (!file.ends_with(".safetensors") || file.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos)
      fields.fail(field, "is " + files::in_quotes(file) + ", wanted the name of a .safetensors file in the same directory");
    shard_of[name] = file;
    if (shards.insert(file).second && shards.size() > kMaxShards)
      fields.fail("weight_map", "names more than " + std::to_string(kMaxShards) + " shards, wanted at most that");
  }
  if (shard_of.empty()) fields.fail("weight_map", "is empty");
  return shard_of;
}

}  // namespace

struct Checkpoint::Storage {
  std::vector<files::MappedFile> files;
  std::vector<std::unique_ptr<uint64_t[]>> copies;

  // `bytes` themselves if they are aligned to their elements, else an aligned copy.
  const void* aligned(std::span<const uint8_t> bytes, int64_t element) {
    static const uint64_t nothing = 0;
    if (bytes.empty()) return &nothing;
    if (reinterpret_cast<uintptr_t>(bytes.data()) % static_cast<uintptr_t>(element) == 0) return bytes.data();
    copies.push_back(std::make_unique_for_overwrite<uint64_t[]>((bytes.size() + 7) / 8));
    std::memcpy(copies.back().get(), bytes.data(), bytes.size());
    return copies.back().get();
  }
};

Checkpoint::Checkpoint() : storage_(std::make_unique<Storage>()) {}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

Checkpoint Checkpoint::open(const fs::path& directory) {
  const bool single = files::is_there(directory / kSingle);
  if (!single && !files::is_there(directory / kIndex))
    files::refuse(directory.native(), "", std::string("has neither ") + kSingle + " nor " + kIndex);
  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards{kSingle};
  if (!single) {
    shard_of = read_index(directory / kIndex);
    shards.clear();
    for (const auto& [name, shard] : shard_of) shards.insert(shard);
  }

  Checkpoint all;
  for (const std::string& shard : shards) {
    const fs::path path = directory / shard;
    const files::MappedFile& file = all.storage_->files.emplace_back(path);
    for (const auto& [name, tensor] : files::parse_safetensors(file.bytes(), path.native()).tensors) {
      if (!single) {
        const auto listed = shard_of.find(name);
        if (listed == shard_of.end()) files::refuse(path.native(), "tensor " + name, std::string("is not listed in ") + kIndex);
        if (listed->second != shard)
          files::refuse(path.native(), "tensor " + name,
                        std::string("belongs to ") + files::in_quotes(listed->second) + " according to " + kIndex);
        shard_of.erase(listed);
      }
      TensorView view;
      view.dtype = dtype_of(tensor.dtype);
      view.dtype_text = tensor.dtype;
      view.sizes = tensor.shape;
      view.bytes = static_cast<int64_t>(tensor.bytes.size());
      view.data = all.storage_->aligned(tensor.bytes, files::safetensors_element_bytes(tensor.dtype));
      all.tensors_.emplace(name, std::move(view));
    }
  }
  if (!shard_of.empty()) {
    const auto& [name, shard] = *shard_of.begin();
    files::refuse((directory / shard).native(), "tensor " + name, std::string("is missing, but ") + kIndex + " lists it");
  }
  return all;
}

const TensorView* Checkpoint::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> all;
  for (const auto& [name, tensor] : tensors_) all.push_back(name);
  return all;
}

int64_t Checkpoint::bytes() const {
  int64_t sum = 0;
  for (const auto& [name, tensor] : tensors_) sum += tensor.bytes;
  return sum;
}

int64_t TensorView::elements() const {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

}  // namespace weft::model
