// First mistakes with --model, each with what to do about it.
#pragma once

#include <string>

namespace weft::tools {

// Throws a sentence where `path` is neither a GGUF file nor a folder of Hugging Face files: nothing, a name on the hub, another file,
// or a folder of Git LFS pointers. Whatever else may be wrong is left to the reader of the folder.
void check_model_path(const std::string& path);

}  // namespace weft::tools
