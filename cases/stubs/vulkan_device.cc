// Stand-in for builds without vulkan: there is no device. Streams on vulkan are refused before anything is timed.
#include "cases/vulkan_device.h"

namespace weft::cases {

Placement* vulkan_placement(int) { return nullptr; }
void validate_vulkan(std::function<void(const std::string&)>, bool) {}
std::vector<double> time_on_vulkan(const Stream&, size_t, int, const std::function<void(const Stream&, size_t)>&) { return {}; }
std::string vulkan_driver(int) { return ""; }
double vulkan_rmw_gbps(int) { return 0; }

}  // namespace weft::cases
