// One builder per op, from options to a Problem. An op of the op list without a builder does not link.
#pragma once

#include <memory>

#include "cases/memory.h"
#include "cases/options.h"
#include "cases/problem.h"

namespace weft::cases {

#define WEFT_BUILDER(name, Args) std::unique_ptr<Problem> build_##name(Options& options, Rng& rng);
WEFT_FOR_EACH_OP(WEFT_BUILDER)
#undef WEFT_BUILDER

// A sequence of ops, not an op itself. `weft bench` lists its cases under this name.
inline constexpr const char* kDeltaMixer = "delta_mixer";
std::unique_ptr<Problem> build_delta_mixer(Options& options, Rng& rng);

inline double bytes_of(const Tensor& tensor) {
  return tensor.present() ? static_cast<double>(tensor.elements() * dtype_bytes(tensor.dtype)) : 0;
}
// Bytes of the tensors of a call. Each tensor counts once: as written if the call writes it, else as read.
template <class Args>
Work traffic(const Args& args) {
  Work work;
  for_each_tensor(args, [&](const Path&, const Tensor& tensor, const TensorRule& rule) {
    (rule.role == Role::out ? work.written_bytes : work.read_bytes) += bytes_of(tensor);
  });
  return work;
}

}  // namespace weft::cases
