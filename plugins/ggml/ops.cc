// The table of ops that the plug-in takes.
#include "engine.h"

namespace weft_ggml {
namespace {

constexpr Op kDeltaNet{"GATED_DELTA_NET", takes_gated_delta_net, compute_gated_delta_net, tokens_of_gated_delta_net};
constexpr Op kConv{"SSM_CONV", takes_ssm_conv, compute_ssm_conv, tokens_of_ssm_conv};
constexpr Op kConvSilu{"SILU of SSM_CONV", takes_conv_silu, compute_conv_silu, tokens_of_ssm_conv};
#ifdef WEFT_GGML_OP_TESTS
constexpr Op kTestNorm{"L2_NORM", takes_test_norm, compute_test_norm, tokens_of_ssm_conv};
#endif

}  // namespace

const Op* find_op(const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_GATED_DELTA_NET: return &kDeltaNet;
    case GGML_OP_SSM_CONV: return &kConv;
    case GGML_OP_UNARY: return &kConvSilu;
#ifdef WEFT_GGML_OP_TESTS
    case GGML_OP_L2_NORM: return &kTestNorm;
#endif
    default: return nullptr;
  }
}

}  // namespace weft_ggml
