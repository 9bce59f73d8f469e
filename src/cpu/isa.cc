// Instruction sets of the cpu backend: see isa.h.
#include "cpu/isa.h"

#include "core/check.h"

namespace weft::cpu {
namespace {

struct IsaTargets {
  Isa isa;
  int64_t targets;
};

// Best first.
constexpr IsaTargets kKnown[] = {
    {Isa::avx512_vnni, HWY_AVX3_DL},        {Isa::avx512, HWY_AVX3}, {Isa::avx2, HWY_AVX2}, {Isa::neon, HWY_NEON},
    {Isa::scalar, HWY_SCALAR | HWY_EMU128},
};

}  // namespace

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> available = [] {
    // NEON is the baseline of its builds: Highway reports no scalar target there, nor detects anything else.
    const int64_t here = HWY_TARGETS & (hwy::SupportedTargets() | HWY_STATIC_TARGET);
    std::vector<Isa> list;
    for (const IsaTargets& known : kKnown)
      if (known.targets & here) list.push_back(known.isa);
    return list;
  }();
  return available;
}

Isa resolve_isa(Isa isa) { return isa == Isa::best ? available_isas().front() : isa; }

int64_t isa_targets(Isa isa) {
  const Isa wanted = resolve_isa(isa);
  for (const IsaTargets& known : kKnown)
    if (known.isa == wanted) return known.targets;
  return 0;
}

Status check_isa(const Stream& stream, const char* op) {
  if (stream.isa == Isa::best) return {};
  std::string have;
  for (Isa isa : available_isas()) {
    if (isa == stream.isa) return {};
    have += (have.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  return fail(Code::unsupported, op, "stream", std::string("asks for isa ") + isa_name(stream.isa) + ", here are " + have);
}

}  // namespace weft::cpu
