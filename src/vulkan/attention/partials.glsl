// Split-KV partials and the outputs of rows as shaders see them: the structs of attention.h. Needs kv_side.glsl.

// Addresses of partials, and their strides in floats.
struct Partials {
  uint64_t o, m, l;
  int64_t o_token, o_head, o_block, o_four;  // o_four: between fours of coordinates
  int64_t m_token, m_head, m_block, l_token, l_head, l_block;
  float empty_m;  // an m at or below this marks an empty block, as l = 0 does
  uint pad;
};

struct Outputs {
  View o, lse;
  Indices sinks;  // f32
};

// Minus infinity: the score of a token that a row must not see.
#define kMasked uintBitsToFloat(0xff800000u)
