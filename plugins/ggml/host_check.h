// Is the ggml that loads the plug-in the one that it was built for?
#pragma once

#include <string>

namespace weft_ggml {

// A sentence that says why the program's ggml does not fit; empty if it fits.
std::string refusal_of_host();

}  // namespace weft_ggml
