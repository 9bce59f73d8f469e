// 64-bit XXH3 checksums: they detect damage, not tampering.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace weft::files {

// The checksum of bytes that are added in several calls.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;

  void add(std::span<const std::byte> bytes);
  void add(const void* data, size_t bytes) { add({static_cast<const std::byte*>(data), bytes}); }
  uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t checksum(std::span<const std::byte> bytes);

// Sixteen hexadecimal digits.
std::string hex(uint64_t value);

}  // namespace weft::files
