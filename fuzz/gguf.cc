// Arbitrary bytes as a GGUF file: values and tensors that lie inside the file, a configuration, a tokenizer and weights, or a weft::Error.
#include "files/gguf.h"

#include <cstdlib>
#include <string_view>
#include <utility>
#include <variant>

#include "model/checkpoint/gguf_config.h"
#include "model/checkpoint/weights.h"
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

// A reader: it succeeds or throws an Error that names the file or the operator.
template <class Read>
void try_to(const Read& read) {
  try {
    read();
  } catch (const weft::Error& error) {
    const std::string_view text = error.what();
    if (!text.starts_with("gguf") && !text.starts_with("checkpoint: ")) std::abort();
  }
}

unsigned sum_of(const weft::model::Projection& projection) {
  unsigned sum = 0;
  for (const weft::model::ProjectionPart& part : projection.parts)
    for (int64_t i = 0; i < part.w.bytes(); ++i) sum += static_cast<const uint8_t*>(part.w.data)[i];
  return sum;
}

// Binds the weights of a file and reads those of the mixers, whose matrices are cut by the sizes of the metadata.
unsigned read_weights(weft::files::GgufFiles file) {
  const weft::model::ModelConfig config = weft::model::read_gguf_config(file);
  weft::model::Checkpoint checkpoint = weft::model::Checkpoint::from_gguf(std::move(file));
  unsigned sum = 0;
  for (const weft::model::LayerWeights& layer : weft::model::bind_gguf_weights(checkpoint, config, 1 << 20).layers)
    sum += std::visit([](const auto& mixer) { return sum_of(mixer.input) + sum_of(mixer.output); }, layer.mixer);
  return sum;
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
    try_to([&] { sum += read_weights(std::move(whole)); });
    volatile unsigned kept = sum;
    (void)kept;
  } catch (const weft::Error& error) {
    if (std::string_view(error.what()).substr(0, 4) != "gguf") std::abort();
  }
  return 0;
}
