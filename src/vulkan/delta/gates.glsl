// The gates of the delta rule: the three forms of decay and the two forms of write strength.
#include "vulkan/common/math.glsl"

struct Gates {
  View g, alpha, a, a_log, dt_bias, beta, b;
  uint double_beta, pad;
};

float raw_log_decay(float a, float a_log, float dt_bias) { return -exp_exact(a_log) * softplus(a + dt_bias); }
float raw_strength(float b, bool doubled) { return (doubled ? 2.0 : 1.0) * sigmoid(b); }

// The forms of the decay, as values of a specialization constant: compilers take minutes where a long loop has all three.
const uint kLogDecay = 0, kLinearDecay = 1, kRawDecay = 2;

// Natural log of the decay of channel c, which is 0 where there is one decay per head.
#define LOG_DECAY(form, gates, t, hv, c)                                                             \
  (form == kLogDecay      ? load(gates.g, at(gates.g, t, hv) + (c))                                  \
   : form == kLinearDecay ? log_exact(load(gates.alpha, at(gates.alpha, t, hv) + (c)))               \
                          : raw_log_decay(load(gates.a, at(gates.a, t, hv) + (c)),                   \
                                          load(gates.a_log, (hv) * gates.a_log.strides[0]),          \
                                          load(gates.dt_bias, (hv) * gates.dt_bias.strides[0] + (c))))
#define STRENGTH(raw, gates, t, hv)                                                       \
  (raw ? raw_strength(load(gates.b, at(gates.b, t, hv)), gates.double_beta != 0) \
       : load(gates.beta, at(gates.beta, t, hv)))
