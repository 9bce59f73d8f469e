// For every token of a kv_encode call: does a later token of its sequence take the same row? A workgroup per token.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/kv/kv_side.glsl"

layout(local_size_x = 128) in;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  CacheIndex index;
  Indices positions;
  Sequences sequences;
  int64_t longest;
  uint64_t overwritten;  // [T], out
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/kv/index.glsl"

shared uint found;

// The keys of two positions of a sequence are equal if and only if the positions share a row. < 0: no row.
int64_t row_key(int64_t position) {
  const bool in_ring = position >= 0 && position <= 0x7fffffff && p.index.kind == kRing && p.index.rows > 0;
  return in_ring ? int64_t(ring_row(uint(position))) : position;
}

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const int64_t n = int64_t(quotient(number, uint64_t(p.longest)));
  const TokenRange range = tokens_of(p.sequences, n);
  const int64_t t = range.begin + int64_t(number) - n * p.longest;
  if (!range.legal || t >= range.end) return;
  if (thread_number() == 0) found = 0;
  barrier();
  const int64_t own = row_key(index_at(p.positions, t));
  bool taken = false;
  for (int64_t later = t + 1 + thread_number(); later < range.end; later += kThreads)
    taken = taken || (own >= 0 && row_key(index_at(p.positions, later)) == own);
  if (taken) atomicOr(found, 1);
  barrier();
  if (thread_number() == 0) Words(p.overwritten + uint64_t(t) * 4).value = found;
}
