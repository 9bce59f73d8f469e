// The configuration of a hybrid model from the metadata of a GGUF file.
#pragma once

#include "files/gguf.h"
#include "model/checkpoint/config.h"

namespace weft::model {

// Reads the architectures qwen35, qwen35moe and qwen3next. Throws weft::Error that names the file, the key, the value and what was
// wanted. Sizes are bounded as by read_config(). `identity` holds only the values that the model computes with, so two files of one
// model have the same identity whatever their names and parts.
ModelConfig read_gguf_config(const files::GgufFiles& file);

}  // namespace weft::model
