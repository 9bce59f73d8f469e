// First mistakes with --model, each with what to do about it.
#pragma once

#include <string>

namespace weft::tools {

// Throws a sentence where `path` is neither a GGUF file nor a folder of Hugging Face files: a path to nothing, a name on the hub,
// another file, or a folder of Git LFS pointers. The reader of the folder finds all other mistakes.
void check_model_path(const std::string& path);

}  // namespace weft::tools
