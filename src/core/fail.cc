// Failures as sentences: see fail.h.
#include "core/fail.h"

#include "weft/printable.h"

namespace weft {

Status fail(Code code, std::string_view op, std::string_view argument, const std::string& what) {
  Status status;
  status.code = code;
  status.op = op;
  status.argument = printable_text(argument);
  status.message = printable_text(status.op + ": " + status.argument + " " + what);
  return status;
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.rank && i < Tensor::kMaxRank; ++i) text += (i ? ", " : "") + std::to_string(tensor.sizes[i]);
  return text + "]";
}

}  // namespace weft
