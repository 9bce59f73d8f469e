// Placements and images: see image.h.
#include "cases/image.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "cases/cuda_device.h"
#include "cases/vulkan_device.h"
#include "core/backend.h"
#include "weft/status.h"

namespace weft::cases {
namespace {

class HostPlacement : public Placement {
 public:
  Place place() const override { return Place::host; }
  uint8_t* allocate(size_t bytes) override {
    constexpr size_t kAlignment = 256;
    auto* p = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
    if (!p) throw std::bad_alloc();
    return p;
  }
  void release(uint8_t* bytes) override { std::free(bytes); }
  void upload(uint8_t* to, const uint8_t* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(uint8_t* to, const uint8_t* from, size_t bytes) override { std::memcpy(to, from, bytes); }
};

}  // namespace

Placement& host_placement() {
  static HostPlacement placement;
  return placement;
}

Placement& placement_of(const Stream& stream) {
  Placement* placement = nullptr;
  switch (place_of(stream.backend)) {
    case Place::host: return host_placement();
    case Place::cuda: placement = cuda_placement(stream.device); break;
    case Place::vulkan: placement = vulkan_placement(stream.device); break;
  }
  if (placement) return *placement;
  Status status;
  status.code = Code::unsupported;
  status.message = std::string("there is no ") + backend_name(stream.backend) + " device to place memory on";
  throw Error(status);
}

Image::Image(const Memory& memory, Placement& placement) : memory_(memory), placement_(placement) {
  for (const Memory::Block& block : memory.blocks()) {
    copies_.push_back(placement.allocate(block.total));
    placement.upload(copies_.back(), block.bytes.get(), block.total);
  }
}

Image::~Image() {
  for (uint8_t* copy : copies_) placement_.release(copy);
}

int64_t Image::block_of(const void* data) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  for (size_t i = 0; i < copies_.size(); ++i) {
    const auto base = reinterpret_cast<uintptr_t>(memory_.blocks()[i].bytes.get());
    if (address >= base && address - base < memory_.blocks()[i].total) return static_cast<int64_t>(i);
  }
  return -1;
}

Tensor Image::at(const Tensor& original) const {
  Tensor moved = original;
  moved.place = placement_.place();
  moved.device = static_cast<int8_t>(placement_.device());
  if (const int64_t i = block_of(original.data); i >= 0)
    moved.data = copies_[static_cast<size_t>(i)] +
                 (static_cast<const uint8_t*>(original.data) - memory_.blocks()[static_cast<size_t>(i)].bytes.get());
  return moved;
}

Tensor Image::fetched(const Tensor& original) const {
  Tensor moved = original;
  if (const int64_t i = block_of(original.data); i >= 0)
    moved.data = const_cast<uint8_t*>(bytes(static_cast<size_t>(i))) +
                 (static_cast<const uint8_t*>(original.data) - memory_.blocks()[static_cast<size_t>(i)].bytes.get());
  return moved;
}

void Image::fetch() {
  if (placement_.place() == Place::host) return;
  host_.resize(copies_.size());
  for (size_t i = 0; i < copies_.size(); ++i) {
    const size_t total = memory_.blocks()[i].total;
    if (!host_[i]) host_[i].reset(host_placement().allocate(total));
    placement_.download(host_[i].get(), copies_[i], total);
  }
}

bool Image::guards_intact() const {
  for (size_t i = 0; i < copies_.size(); ++i)
    if (!memory_.blocks()[i].guards_intact(bytes(i))) return false;
  return true;
}

}  // namespace weft::cases
