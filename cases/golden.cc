// Golden cases: which file gives which cases, and how each is built.
#include "cases/golden.h"

#include <stdexcept>

#include "cases/golden_builders.h"

namespace weft::cases {
namespace {

using Builder = std::unique_ptr<Problem> (*)(const std::string& file, GoldenVariant variant);

// One case per file of op `file_op`: a case of Weft's `op`, built by `build`.
struct Reading {
  const char* file_op;
  const char* op;
  Builder build;
  const char* variant = "";  // appended to the name: "", "/bf16" or "/inverse"
};

constexpr Reading kReadings[] = {
    {"delta_gates", "delta_gates", golden_delta_gates},
    {"short_conv", "short_conv", golden_short_conv},
    {"l2_norm", "l2_norm", golden_l2_norm},
    {"gated_rms_norm", "gated_rms_norm", golden_gated_rms_norm},
    {"delta_chunk", "chunk_cumsum", golden_chunk_cumsum},
    {"delta_chunk", "chunk_kkt", golden_chunk_kkt},
    {"delta_chunk", "chunk_tri_inverse", golden_chunk_tri_inverse},
    {"delta_chunk", "chunk_wu", golden_chunk_wu},
    {"delta_chunk", "chunk_state", golden_chunk_state},
    {"delta_chunk", "chunk_output", golden_chunk_output},
    {"gated_delta_rule_prefill", "gated_delta_rule_prefill", golden_gated_delta_rule_prefill},
    {"gated_delta_rule_prefill", "gated_delta_rule_prefill", golden_gated_delta_rule_prefill, "/bf16"},
    {"gated_delta_rule_decode", "gated_delta_rule_decode", golden_gated_delta_rule_decode},
    {"gated_delta_rule_decode", "gated_delta_rule_decode", golden_gated_delta_rule_decode, "/bf16"},
    {"gated_delta_rule_summarize", "gated_delta_rule_summarize", golden_gated_delta_rule_summarize},
    {"gated_delta_rule_compose", "gated_delta_rule_compose", golden_gated_delta_rule_compose},
    {"gated_delta_rule_apply", "gated_delta_rule_apply", golden_gated_delta_rule_apply},
    {"kv_rotate", "kv_rotate", golden_kv_rotate},
    {"kv_rotate", "kv_rotate", golden_kv_rotate, "/inverse"},
    {"kv_encode", "kv_encode", golden_kv_encode},
    {"kv_encode", "kv_decode", golden_kv_decode},
    {"kv_pack", "kv_repack", golden_kv_repack},
    {"attention_merge", "attention_merge", golden_attention_merge},
    {"compressed_attention", "compressed_attention", golden_compressed_attention},
};

}  // namespace

std::vector<Case> golden_cases() {
  std::vector<Case> cases;
  for (const GoldenFile& file : golden_files()) {
    const std::string op = files::parse_safetensors(file.bytes).metadata["op"];
    for (const Reading& reading : kReadings)
      if (op == reading.file_op)
        cases.push_back({reading.op, "golden/" + std::string(file.name) + reading.variant, "", Tier::fast, file.name});
  }
  return cases;
}

std::unique_ptr<Problem> build_golden(const Case& item) {
  for (const Reading& reading : kReadings) {
    if (item.op != reading.op || item.name != "golden/" + item.golden + reading.variant) continue;
    const std::string variant = reading.variant;
    auto problem = reading.build(item.golden, {variant == "/bf16", variant == "/inverse"});
    problem->shape = {{"golden", item.golden}};
    return problem;
  }
  throw std::runtime_error("golden case " + item.name + " has no builder");
}

}  // namespace weft::cases
