// Arbitrary bytes as a GGUF file: values and tensors that lie inside the file, a configuration and a tokenizer, or a weft::Error.
#include "files/gguf.h"

#include <cstdlib>
#include <string_view>

#include "model/checkpoint/gguf_config.h"
#include "model/tokenizer/tokenizer.h"
#include "weft/status.h"

namespace {

unsigned read_all(const weft::files::Gguf& file) {
  unsigned sum = 0;  // AddressSanitizer checks the reads
  for (const auto& [key, value] : file.fields.all()) {
    sum += static_cast<unsigned>(value.description().size());
    if (value.is_list_of_texts())
      value.texts([&](std::string_view text) {
        for (char c : text) sum += static_cast<unsigned char>(c);
      });
    else if (value.is_list())
      for (uint64_t i = 0; i < value.size(); ++i) sum += value.element(i).number().value_or(0) > 0 ? 1 : 0;
  }
  return sum;
}

// A reader of metadata: it succeeds or throws an Error that names the file.
template <class Read>
void try_to(const Read& read) {
  try {
    read();
  } catch (const weft::Error& error) {
    if (std::string_view(error.what()).substr(0, 4) != "gguf") std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const weft::files::Gguf file = weft::files::parse_gguf({data, size});
    unsigned sum = read_all(file);
    size_t total = 0;
    for (const auto& [name, tensor] : file.tensors) {
      if (tensor.bytes.data() < data || tensor.bytes.data() + tensor.bytes.size() > data + size) std::abort();
      int64_t blocks = 1;
      for (int i = 0; i < tensor.rank; ++i) blocks *= tensor.sizes[static_cast<size_t>(i)];
      if (blocks / tensor.type->block * tensor.type->bytes != static_cast<int64_t>(tensor.bytes.size())) std::abort();
      for (uint8_t byte : tensor.bytes) sum += byte;
      total += tensor.bytes.size();
    }
    if (total > size) std::abort();
    try_to([&] { (void)weft::model::Tokenizer::from_gguf(file.fields).encode("It's a dark night, and 12 ships"); });
    weft::files::GgufFiles whole;
    whole.fields = file.fields;
    whole.tensors = file.tensors;
    try_to([&] { (void)weft::model::read_gguf_config(whole); });
    volatile unsigned kept = sum;
    (void)kept;
  } catch (const weft::Error& error) {
    if (std::string_view(error.what()).substr(0, 4) != "gguf") std::abort();
  }
  return 0;
}
