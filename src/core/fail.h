// Failures as sentences.
#pragma once

#include <string>
#include <string_view>

#include "weft/status.h"
#include "weft/tensor.h"

namespace weft {

// A Status with the message "<op>: <argument> <what>".
Status fail(Code code, std::string_view op, std::string_view argument, const std::string& what);

std::string shape_text(const Tensor& tensor);  // "[4, 128]"

}  // namespace weft
