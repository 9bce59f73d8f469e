// Implementation of host_check.h: the version, the size of a tensor and the numbers of the ops.
#include "host_check.h"

#include <cstring>

#include "ggml.h"

// Old versions lack this function. Without `weak`, the loader would refuse the plug-in with a message about a symbol.
extern "C" __attribute__((weak)) const char* ggml_version(void);

namespace weft_ggml {

std::string refusal_of_host() {
  const std::string mine = std::string("this plug-in was built for ggml ") + WEFT_GGML_VERSION;
  const std::string remedy = "; build it for the ggml of your program with cmake -DWEFT_GGML=<ggml source>";
  if (!ggml_version) return mine + ", and the program has one without ggml_version()" + remedy;
  if (std::strcmp(ggml_version(), WEFT_GGML_VERSION) != 0) return mine + ", and the program has " + ggml_version() + remedy;
  // A fork may have the version number of the original, so the layout of nodes and the numbers of ops are compared, too.
  constexpr size_t kObject = 32;  // size of ggml_object, which precedes every tensor; ggml.h does not declare its members
  if (ggml_tensor_overhead() != kObject + GGML_TENSOR_SIZE)
    return mine + ", and the program has one of that version with tensors of another size" + remedy;
  const struct {
    ggml_op op;
    const char* name;
  } ops[] = {{GGML_OP_GATED_DELTA_NET, "GATED_DELTA_NET"}, {GGML_OP_SSM_CONV, "SSM_CONV"}, {GGML_OP_UNARY, "UNARY"}};
  for (const auto& [op, name] : ops)
    if (std::strcmp(ggml_op_name(op), name) != 0)
      return mine + ", and the program has one of that version whose op " + name + " has another number" + remedy;
  return {};
}

}  // namespace weft_ggml
