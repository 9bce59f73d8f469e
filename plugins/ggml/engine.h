// The resources of one ggml backend of the plug-in, and the table of ops that the plug-in computes.
#pragma once

#include <cstdint>

#include "ggml.h"
#include "weft/device.h"
#include "weft/memory.h"

namespace weft_ggml {

// One ggml backend: its threads and the scratch that its calls share. ggml computes one graph of a backend at a time.
struct Engine {
  weft::Stream stream{.threads = GGML_DEFAULT_N_THREADS, .whole_team = true};  // ggml's own loops have teams of this size, too
  weft::Memory scratch;
};

// Runs a Weft op with the scratch of the engine. The scratch grows to the largest call and is kept.
template <class Args>
void run(Engine& engine, const Args& args, void (*op)(const weft::Stream&, const Args&, weft::Scratch)) {
  op(engine.stream, args, engine.scratch.at_least(scratch_bytes(engine.stream, args)));
}

// An op of ggml that the plug-in computes.
struct Op {
  const char* name;  // the text of ggml_op_desc()
  // Can the plug-in compute this node, whatever its data is? Reads sizes, strides, types and parameters only.
  bool (*takes)(const ggml_tensor* node);
  // Computes the node. `next` is the node that the graph computes after it, or null. Returns how many of the two it computed. Throws on
  // failure.
  int (*compute)(Engine& engine, ggml_tensor* node, ggml_tensor* next);
  int64_t (*tokens)(const ggml_tensor* node);  // tokens of the node, for statistics
};

// The op of a node, or null. The caller must still ask Op::takes().
const Op* find_op(const ggml_tensor* node);

// GATED_DELTA_NET
bool takes_gated_delta_net(const ggml_tensor* node);
int compute_gated_delta_net(Engine& engine, ggml_tensor* node, ggml_tensor* next);
int64_t tokens_of_gated_delta_net(const ggml_tensor* node);

// SSM_CONV, together with the SILU after it, and that SILU alone
bool takes_ssm_conv(const ggml_tensor* node);
int compute_ssm_conv(Engine& engine, ggml_tensor* node, ggml_tensor* next);
bool takes_conv_silu(const ggml_tensor* node);
int compute_conv_silu(Engine& engine, ggml_tensor* node, ggml_tensor* next);
int64_t tokens_of_ssm_conv(const ggml_tensor* node);

// L2_NORM, only in the library of the tests (WEFT_GGML_OP_TESTS): test-backend-ops skips a graph unless the backend takes all of its
// nodes, and its graphs of GATED_DELTA_NET normalise queries and keys.
bool takes_test_norm(const ggml_tensor* node);
int compute_test_norm(Engine& engine, ggml_tensor* node, ggml_tensor* next);

}  // namespace weft_ggml
