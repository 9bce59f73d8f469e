// The SPIR-V of every shader variant, embedded at build time: cmake/WeftVulkan.cmake makes the definition.
#pragma once

#include <cstdint>
#include <span>

namespace weft::vulkan {

struct ShaderCode {
  const char* name;  // stem of the .comp file, then "." and the variant where there are several: "recurrent.E8"
  const unsigned char *begin, *end;
  std::span<const uint32_t> words() const {
    return {reinterpret_cast<const uint32_t*>(begin), static_cast<size_t>(end - begin) / sizeof(uint32_t)};
  }
};

std::span<const ShaderCode> all_shaders();

}  // namespace weft::vulkan
