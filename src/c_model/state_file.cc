// State files and their locks from C: see weft/c_model.h.
#include "weft/state_file.h"

#include <algorithm>
#include <limits>

#include "c_model/handles.h"

using weft::c::guarded;
using weft::c::not_null;

namespace weft::c {
namespace {

// Saves to a path or a lock.
template <class To>
void save(const char* op, const weft_model* model, To& to, const weft_state* state, int64_t sequence, const int32_t* tokens,
          size_t token_count) {
  const weft_state& from = not_null(op, "state", state);
  not_null(op, "model", model).model.save(to, from.state, sequence, list(op, "tokens", tokens, token_count), from.kv);
}

// Loads from a path or a lock.
template <class From>
void load(const char* op, const weft_model* model, From& from, weft_state* state, int64_t sequence, int32_t* tokens,
          size_t capacity, size_t* count) {
  HybridState& to = not_null(op, "state", state).state;
  not_null(op, "model", model);
  if (!tokens && capacity > 0) refuse(op, "tokens", "is null, and its capacity is " + std::to_string(capacity));
  const size_t announced = read_state_file(from).label.ids.size();
  if (count) *count = announced;
  if (announced > capacity)
    refuse(op, "capacity", "is " + std::to_string(capacity) + ", the file has " + std::to_string(announced) + " tokens");
  // Another process may replace the file in between. What is loaded must fit the buffer too.
  const auto most = static_cast<int64_t>(std::min<uint64_t>(capacity, std::numeric_limits<int64_t>::max()));
  const std::vector<int32_t> found = model->model.restore(from, to, sequence, most);
  give<int32_t>(op, found, tokens, capacity, count);
}

StateLockOptions to_options(const char* op, const weft_state_lock_options* options) {
  StateLockOptions out;
  if (!options) return out;
  const weft_state_lock_options given = full_copy(op, "options", options);
  if (flag(op, "options.has_wait", given.has_wait)) out.wait = given.wait;
  if (given.reserved != 0) refuse(op, "options.reserved", "is not 0");
  if (given.on_wait) out.on_wait = [given](int64_t process) { given.on_wait(process, given.user); };
  return out;
}

}  // namespace
}  // namespace weft::c

extern "C" {

weft_code weft_state_save(const weft_model* model, const weft_state* state, int64_t sequence, const char* file,
                          const int32_t* tokens, size_t token_count, weft_status* status) {
  constexpr const char* kOp = "state_save";
  return guarded(kOp, status, [&] {
    const std::filesystem::path path = &not_null(kOp, "file", file);
    weft::c::save(kOp, model, path, state, sequence, tokens, token_count);
  });
}

weft_code weft_state_load(const weft_model* model, weft_state* state, int64_t sequence, const char* file, int32_t* tokens,
                          size_t capacity, size_t* count, weft_status* status) {
  constexpr const char* kOp = "state_load";
  return guarded(kOp, status, [&] {
    const std::filesystem::path path = &not_null(kOp, "file", file);
    weft::c::load(kOp, model, path, state, sequence, tokens, capacity, count);
  });
}

weft_code weft_state_lock_open(const char* file, const weft_state_lock_options* options, weft_state_lock** lock,
                               weft_status* status) {
  constexpr const char* kOp = "state_lock_open";
  return guarded(kOp, status, [&] {
    not_null(kOp, "lock", lock) = nullptr;
    not_null(kOp, "file", file);
    *lock = new weft_state_lock{weft::StateLock(file, weft::c::to_options(kOp, options))};
  });
}

void weft_state_lock_close(weft_state_lock* lock) { delete lock; }

int32_t weft_state_lock_exists(const weft_state_lock* lock) { return lock && lock->lock.exists() ? 1 : 0; }

weft_code weft_state_lock_save(const weft_model* model, weft_state_lock* lock, const weft_state* state, int64_t sequence,
                               const int32_t* tokens, size_t token_count, weft_status* status) {
  constexpr const char* kOp = "state_lock_save";
  return guarded(kOp, status,
                 [&] { weft::c::save(kOp, model, not_null(kOp, "lock", lock).lock, state, sequence, tokens, token_count); });
}

weft_code weft_state_lock_load(const weft_model* model, weft_state_lock* lock, weft_state* state, int64_t sequence, int32_t* tokens,
                               size_t capacity, size_t* count, weft_status* status) {
  constexpr const char* kOp = "state_lock_load";
  return guarded(kOp, status,
                 [&] { weft::c::load(kOp, model, not_null(kOp, "lock", lock).lock, state, sequence, tokens, capacity, count); });
}

}  // extern "C"
