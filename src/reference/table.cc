// The reference backend: every op in double loops, the specification that pins all other backends.
#include "reference/table.h"

namespace weft {
namespace reference {
namespace {

BackendTable make_table() {
  BackendTable table;
  table.list_devices = [](std::vector<DeviceInfo>& devices) {
    devices.push_back({Backend::reference, 0, "reference", "plain double loops on the calling thread", true, ""});
  };
  WEFT_FILL_ENTRIES
  return table;
}

}  // namespace
}  // namespace reference

const BackendTable* reference_backend() {
  static const BackendTable table = reference::make_table();
  return &table;
}

}  // namespace weft
