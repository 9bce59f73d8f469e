// Arbitrary bytes as tokenizer.json and, after a byte 0xFF, a text to encode: tokens that can be decoded, or a weft::Error.
#include "model/tokenizer/tokenizer.h"

#include <cstdlib>

#include "model/tokenizer/unicode.h"
#include "weft/status.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  const size_t cut = std::min(all.find('\xFF'), size);
  try {
    const weft::model::Tokenizer tokenizer = weft::model::Tokenizer::parse(all.substr(0, cut));
    const std::vector<int32_t> ids = tokenizer.encode(cut == size ? "" : all.substr(cut + 1));
    weft::model::StreamDecoder stream(tokenizer);
    std::string pieces;
    for (int32_t id : ids) {
      if (id < 0 || id >= tokenizer.size()) std::abort();
      pieces += stream.push(id);
      if (pieces != weft::model::to_well_formed(pieces)) std::abort();
    }
    if (pieces + stream.finish() != tokenizer.decode(ids)) std::abort();
  } catch (const weft::Error& error) {
    if (std::string_view(error.what()).substr(0, 14) != "tokenizer.json") std::abort();
  }
  return 0;
}
