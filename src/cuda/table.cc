// The table of the cuda backend: kernels for NVIDIA GPUs from Ampere on, with separate paths for Hopper.
#include "cuda/table.h"

#include <string>

#include "cuda/common/device.h"

namespace weft {
namespace {

void list_devices(std::vector<DeviceInfo>& devices) {
  const auto& all = cuda::all_devices();
  if (all.empty()) devices.push_back({Backend::cuda, 0, "cuda", "", false, cuda::why_no_device()});
  for (size_t i = 0; i < all.size(); ++i) {
    const cuda::DeviceFacts& facts = all[i];
    Stream stream;
    stream.backend = Backend::cuda;
    stream.device = static_cast<int>(i);
    const Status status = cuda::check_stream(stream, "weft");
    const std::string detail = "sm_" + std::to_string(facts.major) + std::to_string(facts.minor) + ", " +
                               std::to_string(facts.multiprocessors) + " multiprocessors, " +
                               std::to_string(facts.memory_bytes >> 30) + " GiB, " + std::to_string(facts.l2_bytes >> 20) +
                               " MiB L2; driver " + cuda::driver_text();
    devices.push_back({Backend::cuda, stream.device, facts.name, detail, status.ok(), status.message});
  }
}

BackendTable make_table() {
  BackendTable table;
  table.place = Place::cuda;
  table.check_stream = cuda::check_stream;
  table.list_devices = list_devices;
  table.delta_gates = cuda::delta_gates_row();
  table.short_conv = cuda::short_conv_row();
  table.l2_norm = cuda::l2_norm_row();
  table.gated_rms_norm = cuda::gated_rms_norm_row();
  table.gated_delta_rule_decode = cuda::gated_delta_rule_decode_row();
  table.gated_delta_rule_replay = cuda::gated_delta_rule_replay_row();
  table.gated_delta_rule_prefill = cuda::gated_delta_rule_prefill_row();
  table.chunk_cumsum = cuda::chunk_cumsum_row();
  table.chunk_kkt = cuda::chunk_kkt_row();
  table.chunk_tri_inverse = cuda::chunk_tri_inverse_row();
  table.chunk_wu = cuda::chunk_wu_row();
  table.chunk_state = cuda::chunk_state_row();
  table.chunk_output = cuda::chunk_output_row();
  table.gated_delta_rule_summarize = cuda::gated_delta_rule_summarize_row();
  table.gated_delta_rule_compose = cuda::gated_delta_rule_compose_row();
  table.gated_delta_rule_apply = cuda::gated_delta_rule_apply_row();
  table.kv_rotate = cuda::kv_rotate_row();
  table.kv_encode = cuda::kv_encode_row();
  table.kv_decode = cuda::kv_decode_row();
  table.kv_repack = cuda::kv_repack_row();
  table.attention_scores = cuda::attention_scores_row();
  table.attention_values = cuda::attention_values_row();
  table.attention_partials = cuda::attention_partials_row();
  table.attention_merge = cuda::attention_merge_row();
  table.compressed_attention = cuda::compressed_attention_row();
  return table;
}

}  // namespace

const BackendTable* cuda_backend() {
  static const BackendTable table = make_table();
  return &table;
}

}  // namespace weft
