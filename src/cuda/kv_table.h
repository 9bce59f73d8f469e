// The rows of the cuda backend's table for the compressed KV cache: codec and attention.
#pragma once

#include "core/backend.h"

namespace weft::cuda {

OpRow<KvRotateArgs> kv_rotate_row();
OpRow<KvEncodeArgs> kv_encode_row();
OpRow<KvDecodeArgs> kv_decode_row();
OpRow<KvRepackArgs> kv_repack_row();
OpRow<AttentionScoresArgs> attention_scores_row();
OpRow<AttentionValuesArgs> attention_values_row();
OpRow<AttentionPartialsArgs> attention_partials_row();
OpRow<AttentionMergeArgs> attention_merge_row();
OpRow<CompressedAttentionArgs> compressed_attention_row();

}  // namespace weft::cuda
