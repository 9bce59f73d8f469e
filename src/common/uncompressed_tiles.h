// Which attention over uncompressed 16-bit caches multiplies numbers of 16 bits: what kernels and the tolerances of cases agree on.
#pragma once

#include "weft/kv_codec.h"

namespace weft {

// Query rows of a sequence and kv head from which on such products are the quicker ones.
inline constexpr int kPromptRows = 33;

// K and V alike, f16 or bf16, in tiles.
inline bool uncompressed_tiles(const KvCache& cache) {
  const KvFormat &k = cache.k.format, &v = cache.v.format;
  return cache.layout == KvLayout::tiles && k.passthrough && k.passthrough == v.passthrough && *k.passthrough != DType::f32 &&
         k.head_dim == v.head_dim && (k.head_dim == 64 || k.head_dim == 128 || k.head_dim == 256);
}

}  // namespace weft
