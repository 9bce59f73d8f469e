// The list of ops: the one place where a new op is entered to exist in every backend table, in `weft ops` and in the tests.
#pragma once

#include "weft/compressed_attention.h"
#include "weft/delta_chunk.h"
#include "weft/delta_preprocess.h"
#include "weft/gated_delta_rule.h"
#include "weft/kv_codec.h"

#define WEFT_FOR_EACH_OP(X)                                  \
  X(delta_gates, DeltaGatesArgs)                             \
  X(short_conv, ShortConvArgs)                               \
  X(l2_norm, L2NormArgs)                                     \
  X(gated_rms_norm, GatedRmsNormArgs)                        \
  X(chunk_cumsum, ChunkCumsumArgs)                           \
  X(chunk_kkt, ChunkKktArgs)                                 \
  X(chunk_tri_inverse, ChunkTriInverseArgs)                  \
  X(chunk_wu, ChunkWuArgs)                                   \
  X(chunk_state, ChunkStateArgs)                             \
  X(chunk_output, ChunkOutputArgs)                           \
  X(gated_delta_rule_prefill, GatedDeltaRulePrefillArgs)     \
  X(gated_delta_rule_decode, GatedDeltaRuleDecodeArgs)       \
  X(gated_delta_rule_replay, GatedDeltaRuleReplayArgs)       \
  X(gated_delta_rule_summarize, GatedDeltaRuleSummarizeArgs) \
  X(gated_delta_rule_compose, GatedDeltaRuleComposeArgs)     \
  X(gated_delta_rule_apply, GatedDeltaRuleApplyArgs)         \
  X(kv_rotate, KvRotateArgs)                                 \
  X(kv_encode, KvEncodeArgs)                                 \
  X(kv_decode, KvDecodeArgs)                                 \
  X(kv_repack, KvRepackArgs)                                 \
  X(attention_scores, AttentionScoresArgs)                   \
  X(attention_values, AttentionValuesArgs)                   \
  X(attention_partials, AttentionPartialsArgs)               \
  X(attention_merge, AttentionMergeArgs)                     \
  X(compressed_attention, CompressedAttentionArgs)
