// Arbitrary bytes as a safetensors file: views that lie inside the file and agree with their shapes, or a weft::Error.
#include "files/safetensors.h"

#include <cstdlib>
#include <string_view>

#include "weft/status.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const weft::files::SafeTensors file = weft::files::parse_safetensors({data, size});
    size_t total = 0;
    unsigned sum = 0;
    for (const auto& [name, tensor] : file.tensors) {
      if (tensor.bytes.data() < data || tensor.bytes.data() + tensor.bytes.size() > data + size) std::abort();
      for (uint8_t byte : tensor.bytes) sum += byte;  // AddressSanitizer checks the reads
      bool empty = false;
      for (int64_t extent : tensor.shape) empty |= extent == 0;
      if (empty && !tensor.bytes.empty()) std::abort();
      total += tensor.bytes.size();
    }
    if (total > size || sum > 255u * total) std::abort();
  } catch (const weft::Error& error) {
    if (std::string_view(error.what()).substr(0, 11) != "safetensors") std::abort();
  }
  return 0;
}
