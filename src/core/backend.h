// Backend tables: what a backend fills in to offer an op.
#pragma once

#include "core/op_list.h"

namespace weft {

// What `weft ops` prints of an op on a backend.
struct Limits {
  const char* dtypes = "";  // "f32 f16 bf16"
  const char* shapes = "";  // which of the legal shapes: "all", or what is left out
};

inline constexpr Limits kAllFloats{"f32 f16 bf16", "all"};
inline constexpr Limits kOnlyF32{"f32", "all"};

// One row per op. A row without `launch` means that the backend does not offer the op; it is refused with a sentence.
// `supports` is asked after validate() has passed and may be null: everything legal is supported.
template <class Args>
struct OpRow {
  void (*launch)(const Stream& stream, const Args& args, Scratch scratch) = nullptr;
  Limits limits{};
  Status (*supports)(const Stream& stream, const Args& args) = nullptr;
  Choice (*choose)(const Stream& stream, const Args& args) = nullptr;         // null: "<backend>.<op>"
  size_t (*scratch_bytes)(const Stream& stream, const Args& args) = nullptr;  // null: 0
};

struct BackendTable {
  Place place = Place::host;
  // Is the stream's device, isa and so on there? Asked before any row.
  Status (*check_stream)(const Stream& stream, const char* op) = nullptr;
  void (*list_devices)(std::vector<DeviceInfo>& devices) = nullptr;
#define WEFT_ROW(name, Args) OpRow<Args> name{};
  WEFT_FOR_EACH_OP(WEFT_ROW)
#undef WEFT_ROW
};

// Null when the build has no such backend.
const BackendTable* reference_backend();
const BackendTable* cpu_backend();
const BackendTable* cuda_backend();
const BackendTable* find_backend(Backend backend);

// Is there the backend, and can it compute on the stream, whatever the op? `op` begins the sentence.
Status check_stream(const Stream& stream, const char* op);

// Visits (name, limits) of every op that a table offers, in list order; null limits: not offered.
template <class F>
void for_each_row(const BackendTable& table, F&& visit) {
#define WEFT_VISIT(name, Args) visit(#name, table.name.launch ? &table.name.limits : nullptr);
  WEFT_FOR_EACH_OP(WEFT_VISIT)
#undef WEFT_VISIT
}

}  // namespace weft
