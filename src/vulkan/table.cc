// The table of the vulkan backend: shaders for GPUs with Vulkan 1.2.
#include "vulkan/table.h"

#include <string>

#include "vulkan/common/facts.h"

namespace weft {
namespace {

std::string detail_of(const vulkan::Properties& facts) {
  std::string text = std::string(vulkan::kind_name(facts.kind)) + ", Vulkan " + std::to_string(facts.api_major) + "." +
                     std::to_string(facts.api_minor) + ", subgroups of " + std::to_string(facts.subgroup_size) + ", " +
                     std::to_string(facts.shared_bytes >> 10) + " KiB shared, " + std::to_string(facts.memory_bytes >> 30) +
                     " GiB;";
  if (facts.f16) text += " f16";
  if (facts.int8) text += " int8";
  if (facts.integer_dot) text += " integer_dot";
  if (facts.cooperative_matrix) text += " cooperative_matrix";
  return text + "; driver " + facts.driver;
}

void list_devices(std::vector<DeviceInfo>& devices) {
  const auto& all = vulkan::list_devices();
  if (all.empty()) devices.push_back({Backend::vulkan, 0, "vulkan", "", false, vulkan::why_no_device()});
  for (size_t i = 0; i < all.size(); ++i) {
    Stream stream;
    stream.backend = Backend::vulkan;
    stream.device = static_cast<int>(i);
    const Status status = vulkan::check_stream(stream, "weft");
    devices.push_back({Backend::vulkan, stream.device, all[i].name, detail_of(all[i]), status.ok(), status.message, 1,
                       all[i].kind == vulkan::Kind::cpu});
  }
}

}  // namespace

namespace vulkan {

// Ops that this backend does not compute yet.
WEFT_NOT_OFFERED(chunk_cumsum, ChunkCumsumArgs)
WEFT_NOT_OFFERED(chunk_kkt, ChunkKktArgs)
WEFT_NOT_OFFERED(chunk_tri_inverse, ChunkTriInverseArgs)
WEFT_NOT_OFFERED(chunk_wu, ChunkWuArgs)
WEFT_NOT_OFFERED(chunk_state, ChunkStateArgs)
WEFT_NOT_OFFERED(chunk_output, ChunkOutputArgs)

namespace {

BackendTable make_table() {
  BackendTable table;
  table.place = Place::vulkan;
  table.check_stream = vulkan::check_stream;
  table.list_devices = weft::list_devices;
  WEFT_FILL_ENTRIES
  return table;
}

}  // namespace
}  // namespace vulkan

const BackendTable* vulkan_backend() {
  static const BackendTable table = vulkan::make_table();
  return &table;
}

}  // namespace weft
