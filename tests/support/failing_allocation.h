// Allocation functions that fail on demand, for tests in which every allocation of a call fails in turn. They replace those of the
// whole program: include this header in one file of it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace weft::testing_support {

// Of this thread. The allocation after `left` others fails, and `in_a_row` - 1 that follow; negative: none fails. Allocations of fewer
// than `smallest` bytes never fail, and do not count.
struct AllocationFaults {
  int64_t left = -1;
  int64_t in_a_row = 1;
  size_t smallest = 0;
};
inline constinit thread_local AllocationFaults allocation_faults;

inline void* allocate_or_fail(size_t bytes, size_t alignment) {
  AllocationFaults& faults = allocation_faults;
  if (faults.left >= 0 && bytes >= faults.smallest) {
    if (faults.left > 0)
      --faults.left;
    else if (faults.in_a_row-- > 0)
      throw std::bad_alloc();
  }
  void* memory = std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace weft::testing_support

// All other forms of new and delete call these, or are paired elsewhere. They are not inlined: GCC would warn that new is paired
// with free.
__attribute__((noinline)) void* operator new(size_t bytes) {
  return weft::testing_support::allocate_or_fail(bytes, alignof(std::max_align_t));
}
__attribute__((noinline)) void* operator new(size_t bytes, std::align_val_t alignment) {
  return weft::testing_support::allocate_or_fail(bytes, static_cast<size_t>(alignment));
}
__attribute__((noinline)) void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return weft::testing_support::allocate_or_fail(bytes, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
