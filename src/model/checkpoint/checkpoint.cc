// The tensors of a checkpoint: see checkpoint.h.
#include "model/checkpoint/checkpoint.h"

#include <cstring>

#include "files/gguf.h"
#include "files/json_walk.h"
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

// Which shard holds which tensor.
struct Index {
  std::vector<std::string> shards;           // sorted
  std::map<std::string, uint32_t> shard_of;  // tensor to a position in `shards`
};

// Reads model.safetensors.index.json. Shard names have no directory part, so that an index cannot name files elsewhere.
Index read_index(const fs::path& path) {
  using files::JsonPart;
  const std::string text = files::read_text(path, kMaxIndex), &file = path.native();
  std::optional<JsonPart> map;
  files::check_json_object(text, file).members([&](std::string_view key, const JsonPart& value) {
    if (key != "weight_map") return;
    if (map) files::refuse(file, "", "repeats the key 'weight_map'");
    map = value;
  });
  if (!map || map->is(JsonPart::Kind::null)) files::refuse(file, "weight_map", "is missing, wanted the shard of every tensor");
  if (!map->is(JsonPart::Kind::object)) files::refuse(file, "weight_map", "is " + files::json_text(*map) + ", wanted an object");

  Index index;
  std::map<std::string, uint32_t> numbers;  // of shards, in the order of their first occurrence
  map->members([&](std::string_view name, const JsonPart& value) {
    const auto fail = [&](const std::string& what) { files::refuse(file, "weight_map." + std::string(name), what); };
    if (!value.is(JsonPart::Kind::string)) fail("is " + files::json_text(value) + ", wanted the name of a file");
    const std::string shard = value.string();
    if (!shard.ends_with(".safetensors") || shard.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos)
      fail("is " + files::in_quotes(shard) + ", wanted the name of a .safetensors file in the same directory");
    const uint32_t number = numbers.try_emplace(shard, static_cast<uint32_t>(numbers.size())).first->second;
    if (numbers.size() > kMaxShards)
      files::refuse(file, "weight_map", "names more than " + std::to_string(kMaxShards) + " shards, wanted at most that");
    if (!index.shard_of.emplace(name, number).second) files::refuse(file, "", "repeats the key " + files::in_quotes(name));
  });
  if (index.shard_of.empty()) files::refuse(file, "weight_map", "is empty");

  std::vector<uint32_t> position(numbers.size());
  for (const auto& [shard, number] : numbers) {
    position[number] = static_cast<uint32_t>(index.shards.size());
    index.shards.push_back(shard);
  }
  for (auto& [name, number] : index.shard_of) number = position[number];
  return index;
}

}  // namespace

struct Checkpoint::Storage {
  std::vector<files::MappedFile> files;
  std::vector<std::unique_ptr<uint64_t[]>> copies;
  int64_t copied_bytes = 0;
};

Checkpoint::Checkpoint() : storage_(std::make_unique<Storage>()) {}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

Checkpoint Checkpoint::open(const fs::path& directory) {
  const bool single = files::is_there(directory / kSingle);
  if (!single && !files::is_there(directory / kIndex))
    files::refuse(directory.native(), "", std::string("has neither ") + kSingle + " nor " + kIndex);
  Index index;
  if (single)
    index.shards = {kSingle};
  else
    index = read_index(directory / kIndex);
  auto& [shards, shard_of] = index;

  Checkpoint all;
  for (uint32_t number = 0; number < shards.size(); ++number) {
    const fs::path path = directory / shards[number];
    const files::MappedFile& file = all.storage_->files.emplace_back(path);
    auto tensors = std::move(files::parse_safetensors(file.bytes(), path.native()).tensors);
    while (!tensors.empty()) {  // moved one by one, so that names and shapes are never in memory twice
      auto node = tensors.extract(tensors.begin());
      const std::string& name = node.key();
      files::SafeTensor& tensor = node.mapped();
      if (!single) {
        const auto listed = shard_of.find(name);
        if (listed == shard_of.end()) files::refuse(path.native(), "tensor " + name, std::string("is not listed in ") + kIndex);
        if (listed->second != number)
          files::refuse(path.native(), "tensor " + name,
                        "belongs to " + files::in_quotes(shards[listed->second]) + " according to " + kIndex);
        shard_of.erase(listed);
      }
      TensorView view;
      view.dtype = dtype_of(tensor.dtype);
      if (view.dtype) view.type = weight_type(*view.dtype);
      view.dtype_text = tensor.dtype;
      view.sizes = std::move(tensor.shape);
      view.bytes = static_cast<int64_t>(tensor.bytes.size());
      static const uint64_t nothing = 0;
      view.data = tensor.bytes.empty() ? static_cast<const void*>(&nothing) : tensor.bytes.data();
      all.tensors_.emplace(std::move(node.key()), std::move(view));
    }
  }
  if (!shard_of.empty()) {
    const auto& [name, number] = *shard_of.begin();
    files::refuse((directory / shards[number]).native(), "tensor " + name, std::string("is missing, but ") + kIndex + " lists it");
  }
  return all;
}

Checkpoint Checkpoint::from_gguf(files::GgufFiles file) {
  Checkpoint all;
  all.blocks_ = true;
  for (files::MappedFile& part : file.files) all.storage_->files.push_back(std::move(part));
  while (!file.tensors.empty()) {
    const auto node = file.tensors.extract(file.tensors.begin());
    const files::GgufTensor& tensor = node.mapped();
    TensorView view;
    view.type = find_weight_type(tensor.type->name);
    if (view.type) view.dtype = weight_dtype(*view.type);
    view.dtype_text = tensor.type->name;
    view.sizes.assign(tensor.sizes.begin(), tensor.sizes.begin() + tensor.rank);
    view.bytes = static_cast<int64_t>(tensor.bytes.size());
    view.data = tensor.bytes.data();
    all.tensors_.emplace(node.key(), std::move(view));
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

void Checkpoint::align(std::string_view name, int64_t most_copied) {
  TensorView& view = tensors_.find(name)->second;
  // Only floats need alignment. GGUF files align their tensors, so only floats of safetensors files can be misaligned.
  const auto element = static_cast<uintptr_t>(files::safetensors_element_bytes(view.dtype_text));
  if (element == 0 || reinterpret_cast<uintptr_t>(view.data) % element == 0) return;
  const int64_t words = (view.bytes + 7) / 8;
  if (storage_->copied_bytes + 8 * words > most_copied)
    files::refuse("checkpoint", "tensor " + std::string(name),
                  "is not aligned in its file; copies of such tensors take " + std::to_string(storage_->copied_bytes + 8 * words) +
                      " bytes, and " + std::to_string(most_copied) + " are available");
  auto& copy = storage_->copies.emplace_back(std::make_unique_for_overwrite<uint64_t[]>(static_cast<size_t>(words)));
  std::memcpy(copy.get(), view.data, static_cast<size_t>(view.bytes));
  storage_->copied_bytes += 8 * words;
  view.data = copy.get();
}

int64_t Checkpoint::copied_bytes() const { return storage_->copied_bytes; }

int64_t TensorView::elements() const {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

}  // namespace weft::model
