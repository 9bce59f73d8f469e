// exp, log, and functions made of them, with errors of about two units in the last place. The functions of GLSL may err by much
// more, and differ between drivers.

// e^x; x below -104 gives 0, above 89 infinity.
float exp_exact(float x) {
  if (isnan(x)) return x;
  const float y = clamp(x, -104.0, 89.0);
  precise const float scaled = y * 1.44269504 + 0.5;
  const float n = floor(scaled);
  precise const float high = y - n * 0.693359375;       // exact: 0.693359375 has nine bits
  precise const float r = high + n * 2.12194440054690583e-4;  // ln 2 = 0.693359375 - 2.1219e-4
  precise float p = 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  precise const float small = p * r * r + r;
  const int whole = int(n), half_of = whole / 2;  // 2^n in two factors, each of which is a normal number
  precise const float power = (1.0 + small) * uintBitsToFloat(uint(half_of + 127) << 23);
  return power * uintBitsToFloat(uint(whole - half_of + 127) << 23);
}

// Natural log of x >= 0. Subnormal numbers count as 0.
float log_exact(float x) {
  const uint bits = floatBitsToUint(x);
  if (isnan(x) || bits == 0x7f800000u) return x;
  if (x < 0.0) return uintBitsToFloat(0x7fc00000u);
  if (bits < 0x00800000u || x == 0.0) return uintBitsToFloat(0xff800000u);
  int exponent = int(bits >> 23) - 127;
  float m = uintBitsToFloat((bits & 0x7fffffu) | 0x3f800000u);
  if (m > 1.41421356) {
    m *= 0.5;
    ++exponent;
  }
  // log m = 2 artanh(s) with s = f / (2 + f)
  precise const float f = m - 1.0;
  precise const float s = f / (2.0 + f), z = s * s;
  precise float p = 1.0 / 11.0;
  p = p * z + 1.0 / 9.0;
  p = p * z + 1.0 / 7.0;
  p = p * z + 1.0 / 5.0;
  p = p * z + 1.0 / 3.0;
  // 2 s = f - s f, so that the leading term is exact
  precise const float tail = 2.0 * s * z * p - s * f;
  precise const float e = float(exponent);
  precise const float low = tail - e * 2.12194440054690583e-4;
  precise const float sum = low + f + e * 0.693359375;
  return sum;
}

// log(1 + y) for y >= 0: the error of 1 + y is divided out.
float log1p_exact(float y) {
  precise const float u = 1.0 + y;
  precise const float rounded = u - 1.0;
  if (rounded == 0.0 || isinf(u)) return y;
  return log_exact(u) * (y / rounded);
}

float softplus(float x) { return x > 20.0 ? x : log1p_exact(exp_exact(x)); }
float sigmoid(float x) {
  precise const float below = 1.0 + exp_exact(-x);
  return 1.0 / below;
}
float silu(float x) { return x * sigmoid(x); }
