// Which calls over uncompressed caches use 16-bit products: the rule that kernels and the tolerances of cases share.
#pragma once

#include "weft/kv_codec.h"

namespace weft {

// From so many query rows of a sequence and KV head on, 16-bit products are faster.
inline constexpr int kPromptRows = 33;

// Are both sides f16, or both bf16, in tiles, with the same head size?
inline bool uncompressed_tiles(const KvCache& cache) {
  const KvFormat &k = cache.k.format, &v = cache.v.format;
  return cache.layout == KvLayout::tiles && k.passthrough && k.passthrough == v.passthrough && *k.passthrough != DType::f32 &&
         k.head_dim == v.head_dim && (k.head_dim == 64 || k.head_dim == 128 || k.head_dim == 256);
}

}  // namespace weft
