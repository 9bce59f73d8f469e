// What a legal call of an op may have for shapes: the limits that validate() enforces on every backend, in words.
#pragma once

#include <string>
#include <string_view>

namespace weft {

std::string legal_shapes(std::string_view op);

}  // namespace weft
