// One builder per op that golden files have results for.
#pragma once

#include <memory>
#include <string>

#include "cases/golden_reader.h"
#include "cases/problem.h"

namespace weft::cases {

// How a case uses its file.
struct GoldenVariant {
  bool bf16 = false;     // q, k, v, whose values are bf16 numbers, are passed as bf16
  bool inverse = false;  // kv_rotate: from y to x
};

#define WEFT_GOLDEN(op) std::unique_ptr<Problem> golden_##op(const std::string& file, GoldenVariant variant);
WEFT_GOLDEN(delta_gates)
WEFT_GOLDEN(short_conv)
WEFT_GOLDEN(l2_norm)
WEFT_GOLDEN(gated_rms_norm)
WEFT_GOLDEN(chunk_cumsum)
WEFT_GOLDEN(chunk_kkt)
WEFT_GOLDEN(chunk_tri_inverse)
WEFT_GOLDEN(chunk_wu)
WEFT_GOLDEN(chunk_state)
WEFT_GOLDEN(chunk_output)
WEFT_GOLDEN(gated_delta_rule_prefill)
WEFT_GOLDEN(gated_delta_rule_decode)
WEFT_GOLDEN(gated_delta_rule_summarize)
WEFT_GOLDEN(gated_delta_rule_compose)
WEFT_GOLDEN(gated_delta_rule_apply)
WEFT_GOLDEN(kv_rotate)
WEFT_GOLDEN(kv_encode)
WEFT_GOLDEN(kv_decode)
WEFT_GOLDEN(kv_repack)
WEFT_GOLDEN(attention_merge)
WEFT_GOLDEN(compressed_attention)
#undef WEFT_GOLDEN

}  // namespace weft::cases
