// Writing the codes of rows. Needs rows.glsl and rotate.glsl, whose rows hold a code in each float.

shared uint64_t row_codes[16];  // address of the codes of each row of the workgroup; 0: the row is not written
shared uint row_token[16];

uint code_in(uint row, uint D, uint j) { return uint(row_values[row * D + j]); }

// In lanes order the tokens of a tile share the words of V, so atomic operations change only the bits of the row.
void write_lanes(uint side, uint D, uint count) {
  for (uint i = 0; i < p.sides[side].planes; ++i) {
    const uint width = p.sides[side].plane_width[i], shift = p.sides[side].plane_shift[i], low = (1u << width) - 1;
    const uint64_t offset = uint64_t(p.sides[side].plane_offset[i]);
    if (p.sides[side].role_v != 0) {
      for (uint e = thread_number(); e < count * D; e += kThreads) {
        const uint r = e / D, j = e % D;
        if (row_codes[r] == 0) continue;
        const uvec2 field = lane_field(side, width, row_token[r], j);
        Words word = Words(row_codes[r] + offset + uint64_t(field.x) * 4);
        const uint change = (word.value ^ (code_in(r, D, j) >> shift) << field.y) & low << field.y;
        if (change != 0) atomicXor(word.value, change);
      }
    } else {  // a word belongs to one token
      const uint words = D * width / 32, each = 32 / width;
      for (uint e = thread_number(); e < count * words; e += kThreads) {
        const uint r = e / words, first = e % words * each;
        if (row_codes[r] == 0) continue;
        uint word = 0;
        for (uint f = 0; f < each; ++f) word |= (code_in(r, D, first + f) >> shift & low) << (f % 4 * 8 + f / 4 * width);
        Words(row_codes[r] + offset + uint64_t(lane_field(side, width, row_token[r], first).x) * 4).value = word;
      }
    }
  }
}

// Writes every byte of the codes of `count` rows. All threads call it together, after a barrier.
void write_codes(uint side, uint count) {
  const uint D = p.sides[side].D, bits = p.sides[side].bits;
  if (p.sides[side].lanes != 0) {
    write_lanes(side, D, count);
  } else if (p.sides[side].bytes_each != 0) {
    for (uint e = thread_number(); e < count * D; e += kThreads)
      if (row_codes[e / D] != 0) Bytes(row_codes[e / D] + uint64_t(e % D)).value = uint8_t(code_in(e / D, D, e % D));
  } else {
    const uint words = p.sides[side].code_bytes / 4;
    for (uint e = thread_number(); e < count * words; e += kThreads) {
      const uint r = e / words, w = e % words, begin = 32 * w;
      if (row_codes[r] == 0) continue;
      uint word = 0;
      for (uint j = begin / bits; j < D && j * bits < begin + 32; ++j) {
        const uint code = code_in(r, D, j), at = j * bits;
        word |= at >= begin ? code << (at - begin) : code >> (begin - at);
      }
      if (p.sides[side].words != 0)
        Words(row_codes[r] + uint64_t(4 * w)).value = word;
      else
        for (uint i = 0; i < 4; ++i) Bytes(row_codes[r] + uint64_t(4 * w + i)).value = uint8_t(word >> (8 * i) & 255);
    }
  }
}
