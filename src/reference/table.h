// The reference backend's table, filled family by family.
#pragma once

#include "core/backend.h"

namespace weft::reference {

void fill_delta_parts(BackendTable& table);
void fill_delta_chunk(BackendTable& table);
void fill_gated_delta_rule(BackendTable& table);
void fill_kv_codec(BackendTable& table);
void fill_compressed_attention(BackendTable& table);

}  // namespace weft::reference
