// SSM_CONV and the SILU after it: short_conv on the memory of ggml, where the tokens of a channel lie side by side.
#include <cmath>

#include "engine.h"
#include "tensors.h"
#include "weft/delta_preprocess.h"

namespace weft_ggml {
namespace {

// With fewer tokens ggml is faster, because gathering neighbouring channels costs more than vectors save. Measured:
// docs/lab/llama-cpp.md.
constexpr int64_t kLeastTokens = 4;

// x: the history of W - 1 tokens and the T new tokens, [W - 1 + T, C, N]. weight: [W, C]. Output: [C, T, N]. Sizes in ggml's order.
struct Conv {
  const ggml_tensor *x, *weight;
  int64_t W, C, T, N;
};

Conv conv_of(const ggml_tensor* node) {
  const ggml_tensor *x = node->src[0], *weight = node->src[1];
  return {x, weight, weight->ne[0], weight->ne[1], node->ne[1], node->ne[2]};
}

// The arguments for one sequence. Tokens of several sequences have no common stride, so they do not form one view.
weft::ShortConvArgs args_of(const Conv& conv, float* x, float* weight, float* y, int64_t sequence) {
  const int64_t C = conv.C, history = conv.W - 1;
  float* const first = x + sequence * stride(conv.x, 2);
  weft::ShortConvArgs args;
  args.x = view(first + history, {conv.T, C}, {1, stride(conv.x, 1)});
  args.state_in = view(first, {1, history, C}, {0, 1, stride(conv.x, 1)});
  args.weight = view(weight, {C, conv.W}, {stride(conv.weight, 1), 1});
  args.y = weft::dense(y + sequence * conv.T * C, weft::DType::f32, {conv.T, C});
  args.activation = weft::Activation::none;
  return args;
}

bool is_silu(const ggml_tensor* node) { return node->op == GGML_OP_UNARY && ggml_get_unary_op(node) == GGML_UNARY_OP_SILU; }

bool same_sizes(const ggml_tensor* a, const ggml_tensor* b) {
  for (int i = 0; i < GGML_MAX_DIMS; ++i)
    if (a->ne[i] != b->ne[i]) return false;
  return true;
}

bool apart(const ggml_tensor* a, const ggml_tensor* b) {
  const auto *first = static_cast<const char*>(a->data), *second = static_cast<const char*>(b->data);
  return first + ggml_nbytes(a) <= second || second + ggml_nbytes(b) <= first;
}

void convolve(Engine& engine, const ggml_tensor* node, void* y, weft::Activation activation) {
  const Conv conv = conv_of(node);
  for (int64_t n = 0; n < conv.N; ++n) {
    weft::ShortConvArgs args =
        args_of(conv, static_cast<float*>(conv.x->data), static_cast<float*>(conv.weight->data), static_cast<float*>(y), n);
    args.activation = activation;
    run(engine, args, weft::short_conv);
  }
}

}  // namespace

bool takes_ssm_conv(const ggml_tensor* node) {
  if (!is_f32(node->src[0]) || !is_f32(node->src[1]) || node->type != GGML_TYPE_F32 || !ggml_is_contiguous(node)) return false;
  const Conv conv = conv_of(node);
  if (conv.T < kLeastTokens || conv.N < 1 || conv.C < 1 || conv.x->nb[0] != kFloat || conv.weight->nb[0] != kFloat) return false;
  if (conv.x->ne[0] != conv.W - 1 + conv.T || conv.x->ne[1] != conv.C || conv.x->ne[2] != conv.N || conv.x->ne[3] != 1)
    return false;
  if (node->ne[0] != conv.C || node->ne[3] != 1 || conv.weight->ne[2] != 1 || conv.weight->ne[3] != 1) return false;
  return weft::supports(weft::Stream{.threads = 1}, args_of(conv, pretended(1), pretended(2), pretended(3), 0)).ok();
}

int compute_ssm_conv(Engine& engine, ggml_tensor* node, ggml_tensor* next) {
  const bool silu = next && next->src[0] == node && takes_conv_silu(next);
  // ggml lets the SILU overwrite its input only if no other node reads the convolution, so the two can be fused.
  const bool fused = silu && next->data == node->data;
  convolve(engine, node, node->data, fused ? weft::Activation::silu : weft::Activation::none);
  if (fused) return 2;
  // Otherwise the convolution is computed again, with the SILU, into the memory of the SILU. That works unless ggml placed the SILU
  // in the memory of the inputs.
  if (!silu || !apart(next, node->src[0]) || !apart(next, node->src[1])) return 1;
  convolve(engine, node, next->data, weft::Activation::silu);
  return 2;
}

bool takes_conv_silu(const ggml_tensor* node) {
  const ggml_tensor* conv = node->src[0];
  return is_silu(node) && conv && conv->op == GGML_OP_SSM_CONV && takes_ssm_conv(conv) && node->type == GGML_TYPE_F32 &&
         same_sizes(node, conv) && ggml_is_contiguous(node);
}

// The SILU alone: where a program wants the result of every node (an eval callback), or where the output lies in the memory of the
// inputs.
int compute_conv_silu(Engine&, ggml_tensor* node, ggml_tensor*) {
  const auto* x = static_cast<const float*>(node->src[0]->data);
  auto* y = static_cast<float*>(node->data);
  for (int64_t i = 0, count = ggml_nelements(node); i < count; ++i) y[i] = x[i] / (1.0f + std::exp(-x[i]));
  return 1;
}

int64_t tokens_of_ssm_conv(const ggml_tensor* node) { return node->ne[1] * node->ne[2]; }

}  // namespace weft_ggml
