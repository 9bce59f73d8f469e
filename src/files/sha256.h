// SHA-256, for names that two different texts never share.
#pragma once

#include <string>
#include <string_view>

namespace weft::files {

// 64 hexadecimal digits.
std::string sha256(std::string_view bytes);

}  // namespace weft::files
