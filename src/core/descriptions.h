// The descriptions of every argument struct, and the list of ops: for readers of all of them.
#pragma once

#include "core/describe_attention.h"
#include "core/describe_delta.h"
#include "core/describe_kv.h"
#include "core/op_list.h"
