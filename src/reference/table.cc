// The reference backend: every op in plain double loops, the specification that pins all other backends.
#include "reference/table.h"

namespace weft {
namespace {

BackendTable make_table() {
  BackendTable table;
  table.list_devices = [](std::vector<DeviceInfo>& devices) {
    devices.push_back({Backend::reference, 0, "reference", "plain double loops on the calling thread", true, ""});
  };
  reference::fill_delta_parts(table);
  reference::fill_delta_chunk(table);
  reference::fill_gated_delta_rule(table);
  reference::fill_kv_codec(table);
  reference::fill_compressed_attention(table);
  return table;
}

}  // namespace

const BackendTable* reference_backend() {
  static const BackendTable table = make_table();
  return &table;
}

}  // namespace weft
