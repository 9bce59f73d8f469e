// XXH3 checksums by libxxhash: see checksum.h.
#include "files/checksum.h"

#include <xxhash.h>

#include <cstdio>
#include <new>

namespace weft::files {

struct Checksum::State {
  State() : xxh(XXH3_createState()) {
    if (!xxh) throw std::bad_alloc();
    XXH3_64bits_reset(xxh);
  }
  ~State() { XXH3_freeState(xxh); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  XXH3_state_t* xxh;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

void Checksum::add(std::span<const std::byte> bytes) {
  if (!bytes.empty()) XXH3_64bits_update(state_->xxh, bytes.data(), bytes.size());
}

uint64_t Checksum::value() const { return XXH3_64bits_digest(state_->xxh); }

uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace weft::files
