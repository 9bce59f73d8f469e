/// All op families, memory for them, and the version.
/// @file
#pragma once

#include "weft/compressed_attention.h"
#include "weft/delta_chunk.h"
#include "weft/delta_preprocess.h"
#include "weft/gated_delta_rule.h"
#include "weft/kv_codec.h"
#include "weft/memory.h"
#include "weft/version.h"
