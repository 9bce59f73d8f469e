/// The version of the library, as built.
/// @file
#pragma once

#define WEFT_VERSION_MAJOR 0
#define WEFT_VERSION_MINOR 2
#define WEFT_VERSION_PATCH 0

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {
/// The version of the library that is linked: "0.2.0".
const char* version();
}  // namespace weft
#pragma GCC visibility pop
