// Rows in shared memory and their rotation by a whole workgroup. Params must have `Side sides[2]`. A shader may define ROTATIONS(side) as
// specialization constants below kAnyRotation, which leave code out: drivers on CPUs compile code with many barriers for seconds.
#ifndef ROTATIONS
#define ROTATIONS(side) kAnyRotation
#endif
const uint kNoRotation = 0, kButterflies = 1, kAnyRotation = 2;  // of ROTATIONS
shared float row_values[kRowFloats];  // rows of D floats, one after another

const uint kSrht = 1, kDense = 2;

float signed_scale(uint side, uint j) {
  return (p.sides[side].signs[j >> 5] >> (j & 31) & 1) != 0 ? -p.sides[side].rotate_scale : p.sides[side].rotate_scale;
}

void apply_signs(uint side, uint D, uint total) {
  for (uint e = thread_number(); e < total; e += kThreads) row_values[e] *= signed_scale(side, e % D);
  barrier();
}

// H_run on every run of 2^k values: passes that combine four values, then one that combines pairs if k is odd.
void butterflies(uint run, uint total) {
  uint half_of = 1, shift = 0;
  for (; half_of * 2 < run; half_of *= 4, shift += 2) {
    for (uint q = thread_number(); q < total / 4; q += kThreads) {
      const uint i = ((q >> shift) << (shift + 2)) + (q & (half_of - 1));
      const float x0 = row_values[i], x1 = row_values[i + half_of], x2 = row_values[i + 2 * half_of], x3 = row_values[i + 3 * half_of];
      const float a = x0 + x1, b = x0 - x1, c = x2 + x3, d = x2 - x3;
      row_values[i] = a + c;
      row_values[i + half_of] = b + d;
      row_values[i + 2 * half_of] = a - c;
      row_values[i + 3 * half_of] = b - d;
    }
    barrier();
  }
  if (half_of < run) {
    for (uint q = thread_number(); q < total / 2; q += kThreads) {
      const uint i = ((q >> shift) << (shift + 1)) + (q & (half_of - 1));
      const float low = row_values[i], high = row_values[i + half_of];
      row_values[i] = low + high;
      row_values[i + half_of] = low - high;
    }
    barrier();
  }
}

// H_base, or its transpose, across the runs of every group.
void mix_runs(uint side, bool transposed, uint base, uint run, uint total) {
  for (uint s = thread_number(); s < total / base; s += kThreads) {
    const uint first = s / run * base * run + s % run;
    float from[28];
    for (uint k = 0; k < base; ++k) from[k] = row_values[first + k * run];
    for (uint i = 0; i < base; ++i) {
      float sum = 0;
      for (uint k = 0; k < base; ++k) {
        const uint minus = (transposed ? p.sides[side].rows[k] >> i : p.sides[side].rows[i] >> k) & 1;
        sum += minus != 0 ? -from[k] : from[k];
      }
      row_values[first + i * run] = sum;
    }
  }
  barrier();
}

void rotate_dense(uint side, bool inverse, uint D, uint count) {
  for (uint r = 0; r < count; ++r) {
    float y[4];
    for (uint c = 0; c < 4; ++c) {
      const uint i = thread_number() + c * kThreads;
      float sum = 0;
      for (uint j = 0; i < D && j < D; ++j) {
        const uint row = inverse ? j : i, column = inverse ? i : j;
        sum = fma(float_at(p.sides[side].dense, int64_t(row) * p.sides[side].dense_row + column), row_values[r * D + j], sum);
      }
      y[c] = sum;
    }
    barrier();
    for (uint c = 0; c < 4; ++c) {
      const uint i = thread_number() + c * kThreads;
      if (i < D) row_values[r * D + i] = y[c];
    }
  }
  barrier();
}

// x <- R x or R^T x for `count` rows. All threads of the workgroup call it together, after a barrier. It ends with a barrier.
void rotate_rows(uint side, bool inverse, uint count) {
  const uint D = p.sides[side].D, total = count * D;
  if (ROTATIONS(side) == kNoRotation) return;
  if (ROTATIONS(side) == kAnyRotation) {
    if (p.sides[side].rotation == kDense) rotate_dense(side, inverse, D, count);
    if (p.sides[side].rotation != kSrht) return;
  }
  if (!inverse) apply_signs(side, D, total);
  butterflies(p.sides[side].run, total);
  if (ROTATIONS(side) == kAnyRotation && p.sides[side].base > 1)
    mix_runs(side, inverse, p.sides[side].base, p.sides[side].run, total);
  if (inverse) apply_signs(side, D, total);
}
