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

}  // namespace

namespace cuda {
namespace {

BackendTable make_table() {
  BackendTable table;
  table.place = Place::cuda;
  table.check_stream = cuda::check_stream;
  table.list_devices = list_devices;
  WEFT_FILL_ENTRIES
  // Ops with one kernel for every shape that is not a fast one. Other ops say in their plan how fast a call is.
  for (Limits* limits : {&table.chunk_cumsum.limits, &table.chunk_kkt.limits, &table.chunk_tri_inverse.limits,
                         &table.chunk_wu.limits, &table.chunk_state.limits, &table.chunk_output.limits,
                         &table.gated_delta_rule_compose.limits, &table.gated_delta_rule_apply.limits,
                         &table.attention_scores.limits, &table.attention_values.limits, &table.attention_partials.limits})
    limits->speed = Speed::slow;
  for (Limits* limits : {&table.kv_decode.limits, &table.kv_repack.limits}) limits->speed = Speed::portable;
  return table;
}

}  // namespace
}  // namespace cuda

const BackendTable* cuda_backend() {
  static const BackendTable table = cuda::make_table();
  return &table;
}

}  // namespace weft
