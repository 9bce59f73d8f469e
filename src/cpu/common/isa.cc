// Implementation of isa.h: the instruction sets of the cpu backend.
// clang-format off
#include "cpu/common/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/common/isa.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

int64_t own_target() { return HWY_TARGET; }

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <algorithm>

#include "core/check.h"
#include "cpu/common/isa.h"

namespace weft::cpu {

HWY_EXPORT(own_target);

namespace {

struct IsaTargets {
  Isa isa;
  int64_t targets;
};

// Newer versions of Highway have several NEON targets, among them one without AES instructions.
constexpr int64_t kNeon = HWY_NEON
#if defined(HWY_NEON_WITHOUT_AES)
                          | HWY_NEON_WITHOUT_AES
#endif
#if defined(HWY_NEON_BF16)
                          | HWY_NEON_BF16
#endif
    ;

constexpr int64_t kVectors = HWY_AVX3_DL | HWY_AVX3 | HWY_AVX2 | kNeon;

// Best first. `scalar` also stands for a baseline target that has no name in this list: every machine that runs this build has its
// baseline, so the list of available instruction sets is never empty.
constexpr IsaTargets kKnown[] = {
    {Isa::avx512_vnni, HWY_AVX3_DL},
    {Isa::avx512, HWY_AVX3},
    {Isa::avx2, HWY_AVX2},
    {Isa::neon, kNeon},
    {Isa::scalar, HWY_SCALAR | HWY_EMU128 | (HWY_STATIC_TARGET & ~kVectors)},
};

}  // namespace

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> available = [] {
    // In builds whose baseline is NEON, Highway reports no scalar target and detects no other target.
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

Isa isa_of_kernels(Isa isa) {
  const int64_t target = WEFT_KERNEL(isa, own_target)();
  for (const IsaTargets& known : kKnown)
    if (known.targets & target) return known.isa;
  return Isa::best;
}

Status check_isa(const Stream& stream, const char* op) {
  const std::vector<Isa>& available = available_isas();
  if (stream.isa == Isa::best || std::find(available.begin(), available.end(), stream.isa) != available.end()) return {};
  std::string have;
  for (Isa isa : available) have += (have.empty() ? "" : ", ") + std::string(isa_name(isa));
  return fail(Code::unsupported, op, "stream", std::string("asks for isa ") + isa_name(stream.isa) + ", here are " + have);
}

}  // namespace weft::cpu

#endif  // HWY_ONCE
