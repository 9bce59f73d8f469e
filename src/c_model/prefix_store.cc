// Prefix stores from C: see weft/c_model.h.
#include "weft/prefix_store.h"

#include "c_model/handles.h"

using weft::c::full_copy;
using weft::c::guarded;
using weft::c::list;
using weft::c::not_null;

namespace {

static_assert(WEFT_STATE_STORAGE_F32 == static_cast<int>(weft::StateStorage::f32) &&
              WEFT_STATE_STORAGE_F16 == static_cast<int>(weft::StateStorage::f16) &&
              WEFT_STATE_STORAGE_BF16 == static_cast<int>(weft::StateStorage::bf16) &&
              WEFT_STATE_STORAGE_INT8 == static_cast<int>(weft::StateStorage::int8));

weft::PrefixStoreOptions to_options(const char* op, const weft_prefix_store_options* options) {
  const weft_prefix_store_options given = full_copy(op, "options", options);
  weft::PrefixStoreOptions out;
  out.bytes = given.bytes;
  if (weft::c::flag(op, "options.has_every", given.has_every)) out.every = given.every;
  if (given.recurrent < WEFT_STATE_STORAGE_F32 || given.recurrent > WEFT_STATE_STORAGE_INT8)
    weft::c::refuse(op, "options.recurrent", "is " + std::to_string(given.recurrent) + ", wanted 0..3");
  out.recurrent = static_cast<weft::StateStorage>(given.recurrent);
  return out;
}

}  // namespace

extern "C" {

weft_code weft_prefix_store_create(const weft_prefix_store_options* options, weft_prefix_store** store, weft_status* status) {
  constexpr const char* kOp = "prefix_store_create";
  return guarded(kOp, status, [&] {
    not_null(kOp, "store", store) = nullptr;
    *store = new weft_prefix_store{weft::PrefixStore(to_options(kOp, options))};
  });
}

void weft_prefix_store_free(weft_prefix_store* store) { delete store; }

weft_code weft_prefix_store_read_stats(const weft_prefix_store* store, weft_prefix_store_stats* stats, weft_status* status) {
  constexpr const char* kOp = "prefix_store_read_stats";
  return guarded(kOp, status, [&] {
    weft_prefix_store_stats full = full_copy(kOp, "stats", stats);
    const weft::PrefixStoreStats found = not_null(kOp, "store", store).store.stats();
    full.bytes = found.bytes;
    full.checkpoints = found.checkpoints;
    full.hits = found.hits;
    full.misses = found.misses;
    full.tokens = found.tokens;
    full.inserted = found.inserted;
    full.evicted = found.evicted;
    full.refused = found.refused;
    full.drift = found.drift;
    full.largest_drift = found.largest_drift;
    std::memcpy(stats, &full, full.struct_size);
  });
}

weft_code weft_prefix_store_restore(weft_prefix_store* store, weft_state* state, int64_t sequence, const int32_t* tokens,
                                    size_t token_count, int64_t most, int64_t* restored, weft_status* status) {
  constexpr const char* kOp = "prefix_store_restore";
  return guarded(kOp, status, [&] {
    const int64_t found =
        not_null(kOp, "store", store)
            .store.restore(not_null(kOp, "state", state).state, sequence, list(kOp, "tokens", tokens, token_count), most);
    if (restored) *restored = found;
  });
}

weft_code weft_prefix_store_insert(weft_prefix_store* store, const weft_state* state, int64_t sequence, const int32_t* tokens,
                                   size_t token_count, weft_status* status) {
  constexpr const char* kOp = "prefix_store_insert";
  return guarded(kOp, status, [&] {
    not_null(kOp, "store", store)
        .store.insert(not_null(kOp, "state", state).state, sequence, list(kOp, "tokens", tokens, token_count));
  });
}

weft_code weft_model_prefill(const weft_model* model, const weft_stream* stream, weft_state* state, int64_t sequence,
                             const int32_t* tokens, size_t token_count, float* logits, weft_prefix_store* store, int64_t* restored,
                             weft_status* status) {
  constexpr const char* kOp = "model_prefill";
  return guarded(kOp, status, [&] {
    const int64_t found = not_null(kOp, "model", model)
                              .model.prefill(weft::c::to_stream(kOp, stream), not_null(kOp, "state", state).state, sequence,
                                             list(kOp, "tokens", tokens, token_count), &not_null(kOp, "logits", logits),
                                             not_null(kOp, "store", store).store);
    if (restored) *restored = found;
  });
}

}  // extern "C"
