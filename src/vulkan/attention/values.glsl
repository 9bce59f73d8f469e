// Sums of weighted values: a thread owns the coordinates thread + 128 c of every row. Needs tile.glsl; the shader defines kColumns, the
// coordinates of a thread.
float sums[16];  // [kColumns][kRows]

// Adds the tile's values, multiplied by `weights`. Tokens of weight 0 are skipped: the row does not see them, and their values may
// be NaN.
void add_tile(uint side, uint count) {
  const uint D = p.sides[side].D;
  for (uint token = 0; token < count; ++token)
    for (uint i = 0; i < kRows * kColumns; ++i) {
      const uint d = thread_number() + i / kRows * kThreads;
      const float weight = weights[token * kRows + i % kRows];
      if (d < D && weight != 0.0) sums[i] = fma(weight, tile[token * (D + 1) + d], sums[i]);
    }
}
