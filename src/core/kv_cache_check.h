// Rules of a KvCache that the codec and attention share.
#pragma once

#include "core/check.h"
#include "core/describe_kv.h"
#include "weft/kv_codec.h"

namespace weft {

// Is the format consistent? As validate(KvFormat), but the name of the member becomes text only where there is a fault.
Status validate_format(const KvFormat& format, const char* op, const Path& member);

// What a format allows for the head size, in words.
std::string legal_head_dim();

// Formats, shapes and alignment of both sides, how rows lie, and `pinned`. Binds blocks, Hk, Dk, Dv, and capacity (rows) or tiles.
void check_kv_storage(Check& check, const char* op, const KvCache& cache, const Path& at = "cache");

// How sequences find their rows: only the tensor that the kind of cache reads may be given. Call after Check::members().
void check_kv_lookup(Check& check, const KvCache& cache);

}  // namespace weft
