// The table of the cpu backend, whose SIMD kernels are built for several instruction sets and dispatched at run time.
#include "cpu/table.h"

#include <algorithm>
#include <fstream>
#include <string>

#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"

namespace weft {
namespace {

// The model name in /proc/cpuinfo, or "cpu" where that file has none.
std::string processor_name() {
  std::ifstream list("/proc/cpuinfo");
  for (std::string line; std::getline(list, line);)
    if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(": ") + 2));
  return "cpu";
}

void list_devices(std::vector<DeviceInfo>& devices) {
  const int threads = cpu::thread_count(Stream{});
  std::string detail = std::to_string(threads) + " threads;";
  for (Isa isa : cpu::available_isas()) detail += std::string(" ") + isa_name(isa);
  devices.push_back({Backend::cpu, 0, processor_name(), detail, true, "", threads});
}

BackendTable make_table() {
  BackendTable table;
  table.check_stream = cpu::check_isa;
  table.list_devices = list_devices;
  table.delta_gates = cpu::delta_gates_row();
  table.short_conv = cpu::short_conv_row();
  table.l2_norm = cpu::l2_norm_row();
  table.gated_rms_norm = cpu::gated_rms_norm_row();
  table.gated_delta_rule_prefill = cpu::gated_delta_rule_prefill_row();
  table.gated_delta_rule_decode = cpu::gated_delta_rule_decode_row();
  table.gated_delta_rule_replay = cpu::gated_delta_rule_replay_row();
  table.chunk_cumsum = cpu::chunk_cumsum_row();
  table.chunk_kkt = cpu::chunk_kkt_row();
  table.chunk_tri_inverse = cpu::chunk_tri_inverse_row();
  table.chunk_wu = cpu::chunk_wu_row();
  table.chunk_state = cpu::chunk_state_row();
  table.chunk_output = cpu::chunk_output_row();
  table.gated_delta_rule_summarize = cpu::gated_delta_rule_summarize_row();
  table.gated_delta_rule_compose = cpu::gated_delta_rule_compose_row();
  table.gated_delta_rule_apply = cpu::gated_delta_rule_apply_row();
  table.kv_rotate = cpu::kv_rotate_row();
  table.kv_encode = cpu::kv_encode_row();
  table.kv_decode = cpu::kv_decode_row();
  table.kv_repack = cpu::kv_repack_row();
  table.attention_scores = cpu::attention_scores_row();
  table.attention_values = cpu::attention_values_row();
  table.attention_partials = cpu::attention_partials_row();
  table.attention_merge = cpu::attention_merge_row();
  table.compressed_attention = cpu::compressed_attention_row();
  return table;
}

}  // namespace

const BackendTable* cpu_backend() {
  static const BackendTable table = make_table();
  return &table;
}

}  // namespace weft
