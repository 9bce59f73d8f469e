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

}  // namespace weft::cuda
