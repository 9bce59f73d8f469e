// Is the ggml that loads the plug-in the one that it was built for?
#pragma once

#include <string>

namespace weft_ggml {

// Why not, as a sentence; empty if it is.
std::string refusal_of_host();

}  // namespace weft_ggml
