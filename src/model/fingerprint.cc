// The fingerprint of a model, and saving and restoring states that carry it.
#include <algorithm>

#include "core/check.h"
#include "files/checksum.h"
#include "model/parts.h"
#include "model/state/state_header.h"

namespace weft {
namespace {

constexpr int64_t kSample = 4096;  // bytes sampled at the beginning, in the middle and at the end of every tensor

std::string make_fingerprint(const Model::Parts& parts) {
  const std::string& text = parts.config.identity;
  files::Checksum shapes, numbers;
  shapes.add(text.data(), text.size());
  for (const auto& [name, tensor] : parts.checkpoint.tensors()) {
    shapes.add(name.data(), name.size() + 1);
    shapes.add(tensor.dtype_text.data(), tensor.dtype_text.size() + 1);
    shapes.add(tensor.sizes.data(), tensor.sizes.size() * sizeof(int64_t));
    const auto* data = static_cast<const std::byte*>(tensor.data);
    const int64_t sample = std::min(kSample, tensor.bytes);
    for (int64_t at : {int64_t{0}, (tensor.bytes - sample) / 2, tensor.bytes - sample})
      numbers.add(data + at, static_cast<size_t>(sample));
  }
  return files::hex(shapes.value()) + files::hex(numbers.value());
}

// What a file says about its sequence. Throws where the ids are not those of the sequence.
StateLabel state_label(const Model& model, const HybridState& state, int64_t sequence, std::span<const int32_t> ids,
                       std::string_view kv) {
  weft::model::check_owner("model save", model, state);
  if (static_cast<int64_t>(ids.size()) < state.tokens(sequence))
    throw Error(fail(Code::invalid_argument, "model save", "ids",
                     "are " + std::to_string(ids.size()) + ", wanted at least the " + std::to_string(state.tokens(sequence)) +
                         " tokens of the sequence"));
  if (const auto bad = weft::model::first_invalid_token(ids, model.vocab_size()))
    throw Error(fail(Code::invalid_argument, "model save", "ids", "hold " + *bad));
  return {model.fingerprint(), model.summary(), std::string(kv), {ids.begin(), ids.end()}};
}

}  // namespace

std::string Model::fingerprint() const {
  const std::lock_guard lock(parts_->mutex);
  if (parts_->fingerprint.empty()) parts_->fingerprint = make_fingerprint(*parts_);
  return parts_->fingerprint;
}

void model::check_owner(const char* op, const Model& model, const HybridState& state) {
  if (const std::string& owner = state.plan().model; !owner.empty() && owner != model.fingerprint())
    throw Error(fail(Code::invalid_argument, op, "state",
                     "was made for another model, wanted one from create_state() or plan() of this model"));
}

void Model::save(const std::filesystem::path& file, const HybridState& state, int64_t sequence, std::span<const int32_t> ids,
                 std::string_view kv) const {
  save_state(file, state, sequence, state_label(*this, state, sequence, ids, kv));
}

void Model::save(StateLock& lock, const HybridState& state, int64_t sequence, std::span<const int32_t> ids,
                 std::string_view kv) const {
  save_state(lock, state, sequence, state_label(*this, state, sequence, ids, kv));
}

std::vector<int32_t> Model::restore(const std::filesystem::path& file, HybridState& state, int64_t sequence,
                                    int64_t most_ids) const {
  model::check_owner("model restore", *this, state);
  return load_state(file, state, sequence, fingerprint(), vocab_size(), most_ids).ids;
}

std::vector<int32_t> Model::restore(StateLock& lock, HybridState& state, int64_t sequence, int64_t most_ids) const {
  model::check_owner("model restore", *this, state);
  return load_state(lock, state, sequence, fingerprint(), vocab_size(), most_ids).ids;
}

}  // namespace weft
