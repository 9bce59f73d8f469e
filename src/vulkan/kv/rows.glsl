// Reading the rows of a cache. Params must have `Side sides[2]`: a side is named by its index.

// Where a row is stored. In lanes order `codes` is its tile.
struct RowAt {
  uint64_t codes, gains;
  uint token;  // index in its tile
};

RowAt row_at(uint side, int64_t block, int64_t head, uint row) {
  const uint64_t codes = p.sides[side].codes + uint64_t(block * p.sides[side].codes_block + head * p.sides[side].codes_head);
  if (p.sides[side].tiles == 0)
    return RowAt(codes + uint64_t(int64_t(row) * p.sides[side].codes_row),
                 p.sides[side].gains + uint64_t(block * p.sides[side].gains_block + head * p.sides[side].gains_head +
                                                int64_t(row) * p.sides[side].gains_row),
                 0);
  const uint token = row % kTileTokens, bytes = p.sides[side].code_bytes;
  const uint64_t tile = codes + uint64_t(int64_t(row / kTileTokens) * p.sides[side].codes_row);
  return RowAt(p.sides[side].lanes != 0 ? tile : tile + uint64_t(token * bytes),
               tile + uint64_t(kTileTokens * bytes + token * p.sides[side].gain_bytes), token);
}

// Where a field of `width` bits lies in lanes order: common/lanes_tile.h. x: the 32-bit word of its plane; y: its lowest bit there.
uvec2 lane_field(uint side, uint width, uint token, uint coordinate) {
  const bool v = p.sides[side].role_v != 0;
  const uint packed_ = v ? token : coordinate, spread = v ? coordinate : token;
  const uint per_vector = 32 / width, vectors = (v ? p.sides[side].D : kTileTokens) / 16;
  const uint group = packed_ / per_vector, inside = packed_ % per_vector;
  return uvec2((group * vectors + spread / 16) * 16 + spread % 16, inside % 4 * 8 + inside / 4 * width);
}

// The codes of coordinates j .. j + 7; j is a multiple of 8.
void codes_at(uint side, RowAt at, uint j, out uint code[8]) {
  const uint bits = p.sides[side].bits, mask = (1u << bits) - 1;
  if (p.sides[side].lanes != 0) {
    for (uint e = 0; e < 8; ++e) code[e] = 0;
    for (uint i = 0; i < p.sides[side].planes; ++i) {
      const uint width = p.sides[side].plane_width[i], shift = p.sides[side].plane_shift[i], low = (1u << width) - 1;
      const uint64_t plane = at.codes + uint64_t(p.sides[side].plane_offset[i]);
      if (p.sides[side].role_v != 0) {
        for (uint e = 0; e < 8; ++e) {
          const uvec2 field = lane_field(side, width, at.token, j + e);
          code[e] |= (word_at(plane, field.x) >> field.y & low) << shift;
        }
      } else {  // four neighbouring coordinates share a word
        for (uint four = 0; four < 8; four += 4) {
          const uvec2 field = lane_field(side, width, at.token, j + four);
          const uint word = word_at(plane, field.x) >> field.y;
          for (uint e = 0; e < 4; ++e) code[four + e] |= (word >> (8 * e) & low) << shift;
        }
      }
    }
    return;
  }
  if (p.sides[side].bytes_each != 0) {
    for (uint e = 0; e < 8; ++e) code[e] = byte_at(at.codes, j + e) & mask;
    return;
  }
  uint64_t window = 0;  // the `bits` bytes of the eight codes
  if (p.sides[side].words != 0) {
    const uint first = j * bits, begin = first / 32, shift = first % 32, end = (first + 8 * bits - 1) / 32;
    window = uint64_t(word_at(at.codes, begin)) >> shift;
    if (end > begin) window |= uint64_t(word_at(at.codes, begin + 1)) << (32 - shift);
    if (end > begin + 1) window |= uint64_t(word_at(at.codes, begin + 2)) << (64 - shift);
  } else {
    for (uint i = 0; i < bits; ++i) window |= uint64_t(byte_at(at.codes, j / 8 * bits + i)) << (8 * i);
  }
  for (uint e = 0; e < 8; ++e) code[e] = uint(window >> (e * bits)) & mask;
}

// The factor of the levels of gain group `group`.
float gain_at(uint side, RowAt at, uint group) {
  return load(at.gains, p.sides[side].gain, int64_t(group)) * p.sides[side].gain_factor;
}

shared float side_levels[512];  // the codebooks of both sides

// Call it, then a barrier, before values_at().
void load_levels() {
  for (uint e = thread_number(); e < 512; e += kThreads)
    if ((e & 255) < 1u << p.sides[e >> 8].bits) side_levels[e] = p.sides[e >> 8].levels[e & 255];
}

// Coordinates j .. j + 7 of y^, or of the row itself on a passthrough side; j is a multiple of 8.
void values_at(uint side, RowAt at, uint j, out float value[8]) {
  if (p.sides[side].passthrough != 0) {
    for (uint e = 0; e < 8; ++e) value[e] = load(at.codes, p.sides[side].value, int64_t(j + e));
    return;
  }
  uint code[8];
  codes_at(side, at, j, code);
  const uint g = p.sides[side].gain_group;
  if (g % 8 == 0) {
    const float gain = gain_at(side, at, j / g);
    for (uint e = 0; e < 8; ++e) value[e] = gain * side_levels[side * 256 + code[e]];
  } else {
    for (uint e = 0; e < 8; ++e) value[e] = gain_at(side, at, (j + e) / g) * side_levels[side * 256 + code[e]];
  }
}
