// Arbitrary text as the name of a KV side or recipe: a consistent format, or an Error that names its operator.
#include <cstdlib>
#include <string_view>

#include "weft/kv_codec.h"

namespace {

void expect(bool good) {
  if (!good) std::abort();
}

template <class Make>
void expect_error_or(std::string_view op, Make&& make) {
  try {
    make();
  } catch (const weft::Error& error) {
    expect(error.status().op == op);
    expect(!error.status().argument.empty());
    expect(std::string_view(error.what()).substr(0, op.size()) == op);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  // Two bytes choose head sizes, legal ones more often than not.
  const auto head_dim = [](uint8_t byte) { return byte < 200 ? 8 * (byte % 66) : int64_t{byte} - 220; };
  const int64_t k_dim = head_dim(data[0]), v_dim = head_dim(data[1]);
  const std::string_view name(reinterpret_cast<const char*>(data + 2), size - 2);
  expect_error_or("kv_format", [&] {
    const weft::KvFormat format = weft::kv_format(name, k_dim, data[2]);
    expect(weft::validate(format, "fuzz", "format").ok());
    expect(weft::code_bytes(format) > 0 && weft::gain_bytes(format) >= 0);
    expect(weft::tile_bytes(format) >= weft::kTileTokens * weft::code_bytes(format));
  });
  expect_error_or("kv_recipe", [&] {
    const weft::KvRecipe recipe = weft::kv_recipe(name, k_dim, v_dim, data[2]);
    expect(weft::validate(recipe.k, "fuzz", "k").ok() && weft::validate(recipe.v, "fuzz", "v").ok());
    expect(weft::bytes_per_token(recipe) > 0 && !recipe.id.empty());
  });
  return 0;
}
