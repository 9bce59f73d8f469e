// The rows of the cuda backend's table, one function per op that it offers.
#pragma once

#include "core/backend.h"

namespace weft::cuda {

OpRow<DeltaGatesArgs> delta_gates_row();
OpRow<ShortConvArgs> short_conv_row();
OpRow<L2NormArgs> l2_norm_row();
OpRow<GatedRmsNormArgs> gated_rms_norm_row();
OpRow<GatedDeltaRuleDecodeArgs> gated_delta_rule_decode_row();
OpRow<GatedDeltaRuleReplayArgs> gated_delta_rule_replay_row();
OpRow<GatedDeltaRulePrefillArgs> gated_delta_rule_prefill_row();
OpRow<ChunkCumsumArgs> chunk_cumsum_row();
OpRow<ChunkKktArgs> chunk_kkt_row();
OpRow<ChunkTriInverseArgs> chunk_tri_inverse_row();
OpRow<ChunkWuArgs> chunk_wu_row();
OpRow<ChunkStateArgs> chunk_state_row();
OpRow<ChunkOutputArgs> chunk_output_row();
OpRow<GatedDeltaRuleSummarizeArgs> gated_delta_rule_summarize_row();
OpRow<GatedDeltaRuleComposeArgs> gated_delta_rule_compose_row();
OpRow<GatedDeltaRuleApplyArgs> gated_delta_rule_apply_row();

}  // namespace weft::cuda
