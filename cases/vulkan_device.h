// Memory, submission and timing of Vulkan devices for cases and tools. cases/stubs/ stands in where a build has no vulkan.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cases/image.h"

namespace weft::cases {

// Memory of a device, or null where there is none. The device is opened on first use and stays open until the program ends.
Placement* vulkan_placement(int device);

// Opens devices with the validation layers from now on, and gives every message of them to the function. Call it before the first
// vulkan_placement(). `staged`: copies go through staging buffers.
void validate_vulkan(std::function<void(const std::string& message)> on_message, bool staged);

// Seconds per call: calls 0 .. calls - 1, or a multiple of them so that the submission weighs little, are recorded into one command
// buffer, which is submitted `repeat` times (0: the function chooses). The time runs from the submission to its end, as the host sees it.
std::vector<double> time_on_vulkan(const Stream& stream, size_t calls, int repeat,
                                   const std::function<void(const Stream& stream, size_t call)>& call);

// "NVIDIA 580.159, Vulkan 1.4"
std::string vulkan_driver(int device);

// Memory updated in place, in GB/s: bytes read and bytes written both count. Measured by l2_norm in place over rows of 128 floats.
double vulkan_rmw_gbps(int device);

}  // namespace weft::cases
