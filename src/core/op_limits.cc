// Limits of the ops in words: see op_limits.h. The numbers are those that calls are checked against.
#include "core/op_limits.h"

#include <stdexcept>

#include "core/limits.h"
#include "weft/weft.h"

namespace weft {

std::string legal_shapes(std::string_view op) {
  const std::string heads = "Hv a multiple of Hk, K and V up to " + std::to_string(kMaxDeltaHeadSize);
  const std::string head_dim = "D a multiple of 8 up to " + std::to_string(kMaxHeadDim);
  if (op == "short_conv") return "W " + std::to_string(kMinConvWidth) + " to " + std::to_string(kMaxConvWidth) + ", any C";
  if (op == "chunk_cumsum" || op == "chunk_tri_inverse") return "chunks of 16, 32 or 64";
  if (op.starts_with("chunk_")) return heads + "; chunks of 16, 32 or 64";
  if (op == "gated_delta_rule_decode" || op == "gated_delta_rule_replay")
    return heads + "; up to " + std::to_string(kMaxDecodeTokens) + " tokens a sequence";
  if (op.starts_with("gated_delta_rule_")) return heads;
  if (op.starts_with("kv_")) return head_dim + "; passthrough or 2 to 8 bits";
  if (op == "attention_merge") return head_dim;
  if (op.starts_with("attention_") || op == "compressed_attention")
    return head_dim + ", Hq a multiple of Hk; passthrough or 2 to 8 bits a side";
  if (op == "delta_gates" || op == "l2_norm" || op == "gated_rms_norm") return "any";
  throw std::logic_error("no limits are written down for " + std::string(op));
}

}  // namespace weft
