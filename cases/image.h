// The memory that a case runs in: a Placement is a kind of memory, an Image is a copy of a Memory in a Placement.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cases/memory.h"
#include "weft/device.h"

namespace weft::cases {

// Memory that a backend computes in. Host memory is implemented here; a device backend adds its own, with copies to and from the
// host.
class Placement {
 public:
  virtual ~Placement() = default;
  virtual Place place() const = 0;
  virtual int device() const { return 0; }
  virtual uint8_t* allocate(size_t bytes) = 0;  // aligned to 256 bytes
  virtual void release(uint8_t* bytes) = 0;
  virtual void upload(uint8_t* to, const uint8_t* from, size_t bytes) = 0;
  virtual void download(uint8_t* to, const uint8_t* from, size_t bytes) = 0;
  // Calls work(stream), with a queue where the backend needs one, and waits for what it queued where download() does not.
  virtual void run(const Stream& stream, const std::function<void(const Stream&)>& work) { work(stream); }
};

Placement& host_placement();

// The placement of a stream's backend. Throws Error where this build has none.
Placement& placement_of(const Stream& stream);

// A copy of every block of a Memory, guard bands included, made at construction. The Memory must outlive the Image and must not
// grow.
class Image {
 public:
  Image(const Memory& memory, Placement& placement);
  ~Image();
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  // `original`, a view of the Memory, as a view of the image. A view of other memory keeps its address; only its place changes.
  Tensor at(const Tensor& original) const;
  // As at(), but on the host, where results are compared. For placements other than the host call fetch() first.
  Tensor fetched(const Tensor& original) const;
  void fetch();
  // All bytes of block i, as fetched.
  const uint8_t* bytes(size_t i) const { return host_.empty() ? copies_[i] : host_[i].get(); }
  bool guards_intact() const;  // as fetched

  const Memory& memory() const { return memory_; }
  const Placement& placement() const { return placement_; }

 private:
  // Index of the block that an address lies in, or -1.
  int64_t block_of(const void* data) const;

  const Memory& memory_;
  Placement& placement_;
  std::vector<uint8_t*> copies_;
  std::vector<std::unique_ptr<uint8_t, Memory::Free>> host_;  // copies that fetch() made, aligned as Memory's; empty on the host
};

}  // namespace weft::cases
