// Arbitrary text as the options of a case ("T=64,Hk=2"): values of every type, or an OptionError.
#include "cases/options.h"

#include <cmath>
#include <cstdlib>

namespace {

template <class Read>
void read_or_refuse(Read&& read) {
  try {
    read();
  } catch (const weft::cases::OptionError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read_or_refuse([&] {
    weft::cases::Options options(text);
    read_or_refuse([&] {
      const int64_t value = options.integer("T", 1, 0, 100);
      if (value < 0 || value > 100) std::abort();
    });
    read_or_refuse([&] {
      if (std::isnan(options.real("scale", 1.0))) std::abort();
    });
    read_or_refuse([&] { options.flag("norm"); });
    read_or_refuse([&] { options.choice("keys", "gaussian", {"gaussian", "identical"}); });
    read_or_refuse([&] { options.text("kv", "4v4"); });
    read_or_refuse([&] { options.list("lens"); });
    read_or_refuse([&] { options.dtype("dtype", weft::DType::f32); });
    read_or_refuse([&] { options.finish("fuzz"); });
    weft::cases::Options merged("T=1");
    merged.merge(options);
    if (!merged.has("T")) std::abort();
  });
  return 0;
}
