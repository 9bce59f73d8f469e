// L2_NORM for the library of the tests: ggml's formula in plain loops.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine.h"
#include "tensors.h"

namespace weft_ggml {

bool takes_test_norm(const ggml_tensor* node) {
  return is_f32(node->src[0]) && node->src[0]->nb[0] == kFloat && node->type == GGML_TYPE_F32 && ggml_is_contiguous(node);
}

int compute_test_norm(Engine&, ggml_tensor* node, ggml_tensor*) {
  const ggml_tensor* x = node->src[0];
  float eps = 0;
  std::memcpy(&eps, node->op_params, sizeof eps);
  auto* y = static_cast<float*>(node->data);
  const int64_t D = x->ne[0];
  for (int64_t n = 0; n < x->ne[3]; ++n)
    for (int64_t t = 0; t < x->ne[2]; ++t)
      for (int64_t h = 0; h < x->ne[1]; ++h, y += D) {
        const float* row = static_cast<const float*>(x->data) + n * stride(x, 3) + t * stride(x, 2) + h * stride(x, 1);
        double sum = 0;
        for (int64_t i = 0; i < D; ++i) sum += static_cast<double>(row[i]) * row[i];
        const float scale = 1.0f / std::max(static_cast<float>(std::sqrt(sum)), eps);
        for (int64_t i = 0; i < D; ++i) y[i] = row[i] * scale;
      }
  return 1;
}

}  // namespace weft_ggml
