// Stands in for arc4random(), which glibc has from 2.36 on and the std::random_device of a static libstdc++ reads, in wheels for older
// systems.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

extern "C" uint32_t arc4random() {
  uint32_t value = 0;
  if (getentropy(&value, sizeof value) != 0) std::abort();
  return value;
}
