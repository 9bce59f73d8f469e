// Tensors, indices and sequences as shaders read them, and the number of a workgroup. The structs are those of views.h.
// A shader includes this file, declares `Params` with all members that it reads, and then the push constants:
//   layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params { ... };
//   layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/common/elements.glsl"

struct View {
  uint64_t data;
  uint dtype, rank;  // rank 0: absent
  int64_t sizes[5], strides[5];
};

bool present(View t) { return t.rank > 0; }
float load(View t, int64_t i) { return load(t.data, t.dtype, i); }
void store(View t, int64_t i, float value) { store(t.data, t.dtype, i, value); }
int64_t at(View t, int64_t i, int64_t j) { return i * t.strides[0] + j * t.strides[1]; }

// A vector of i32 or i64.
struct Indices {
  uint64_t data;
  int64_t stride;
  uint wide, there;  // wide: i64
};

int64_t index_at(Indices indices, int64_t i) {
  if (indices.wide != 0) return Int64(address(indices.data, i * indices.stride, 8)).value;
  return int64_t(Int32(address(indices.data, i * indices.stride, 4)).value);
}

// The number of this workgroup of a dispatch that recorder.cc folded into three dimensions. Numbers of `groups` and above have no work.
uint64_t workgroup_number() {
  return (uint64_t(gl_WorkGroupID.z) * gl_NumWorkGroups.y + gl_WorkGroupID.y) * gl_NumWorkGroups.x + gl_WorkGroupID.x;
}

// a / b, by 32 bits where they suffice: divisions of 64 bits are slow.
uint64_t quotient(uint64_t a, uint64_t b) {
  return ((a | b) >> 32) == 0 ? uint64_t(uint(a) / uint(b)) : a / b;
}

struct Sequences {
  Indices cu_seqlens;
  int64_t count, max_tokens;
  int64_t each, tokens;  // each: tokens of every sequence, when they are uniform. tokens: those of the whole call
};

struct TokenRange {
  int64_t begin, end;
  bool legal;  // false: an inert sequence
};

TokenRange tokens_of(Sequences s, int64_t n) {
  if (s.cu_seqlens.there == 0) return TokenRange(n * s.each, (n + 1) * s.each, true);
  const int64_t begin = index_at(s.cu_seqlens, n), end = index_at(s.cu_seqlens, n + 1);
  const bool legal = begin >= 0 && end >= begin && end <= s.tokens && end - begin <= s.max_tokens;
  return legal ? TokenRange(begin, end, true) : TokenRange(0, 0, false);
}

// Slot of sequence n in a pool of `slots`, or -1: inert.
int64_t slot_of(Indices indices, int64_t n, int64_t slots) {
  const int64_t slot = indices.there != 0 ? index_at(indices, n) : n;
  return slot >= 0 && slot < slots ? slot : int64_t(-1);
}
