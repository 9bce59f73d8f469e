// Loads and stores of f32, f16 and bf16 elements by address. Conversions use integer operations where drivers round differently, so
// that every driver stores the same bits.
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require

// The values of weft::DType.
const uint kF32 = 0, kF16 = 1, kBf16 = 2, kI32 = 3, kI64 = 4, kU8 = 5, kU32 = 6;

layout(buffer_reference, scalar, buffer_reference_align = 4) buffer Float32 { float value; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer Int32 { int value; };
layout(buffer_reference, scalar, buffer_reference_align = 8) buffer Int64 { int64_t value; };
layout(buffer_reference, scalar, buffer_reference_align = 2) buffer Bits16 { uint16_t value; };
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer Float32x4 { vec4 value; };
layout(buffer_reference, scalar, buffer_reference_align = 8) buffer Bits16x4 { uvec2 value; };

uint64_t address(uint64_t data, int64_t i, uint bytes) { return data + uint64_t(i) * bytes; }

uint bf16_bits(float value) {
  const uint u = floatBitsToUint(value);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (u >> 16) | 0x40u;  // NaN stays NaN
  return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

uint f16_bits(float value) {
  const uint u = floatBitsToUint(value), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (magnitude < 0x33000000u) return sign;             // less than half of 2^-24
  if (magnitude < 0x38800000u) {                        // subnormal: a multiple of 2^-24, rounded to even
    const uint shift = 126u - (magnitude >> 23), m = (magnitude & 0x7fffffu) | 0x800000u;
    return sign | (m + (1u << (shift - 1u)) - 1u + ((m >> shift) & 1u)) >> shift;
  }
  return sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13);
}

float f16_value(uint bits) {
  const uint sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return uintBitsToFloat(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0u) return uintBitsToFloat(sign | floatBitsToUint(float(mantissa) * 5.9604644775390625e-8));  // mantissa * 2^-24
  return uintBitsToFloat(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}
float bf16_value(uint bits) { return uintBitsToFloat(bits << 16); }

float load(uint64_t data, uint dtype, int64_t i) {
  if (dtype == kF32) return Float32(address(data, i, 4)).value;
  const uint bits = uint(Bits16(address(data, i, 2)).value);
  return dtype == kBf16 ? bf16_value(bits) : f16_value(bits);
}

void store(uint64_t data, uint dtype, int64_t i, float value) {
  if (dtype == kF32)
    Float32(address(data, i, 4)).value = value;
  else
    Bits16(address(data, i, 2)).value = uint16_t(dtype == kBf16 ? bf16_bits(value) : f16_bits(value));
}

// Four elements at an address that is aligned to all four of them.
vec4 load4(uint64_t data, uint dtype, int64_t i) {
  if (dtype == kF32) return Float32x4(address(data, i, 4)).value;
  const uvec2 w = Bits16x4(address(data, i, 2)).value;
  if (dtype == kBf16)
    return vec4(bf16_value(w.x & 0xffffu), bf16_value(w.x >> 16), bf16_value(w.y & 0xffffu), bf16_value(w.y >> 16));
  return vec4(f16_value(w.x & 0xffffu), f16_value(w.x >> 16), f16_value(w.y & 0xffffu), f16_value(w.y >> 16));
}

void store4(uint64_t data, uint dtype, int64_t i, vec4 v) {
  if (dtype == kF32)
    Float32x4(address(data, i, 4)).value = v;
  else if (dtype == kBf16)
    Bits16x4(address(data, i, 2)).value = uvec2(bf16_bits(v.x) | bf16_bits(v.y) << 16, bf16_bits(v.z) | bf16_bits(v.w) << 16);
  else
    Bits16x4(address(data, i, 2)).value = uvec2(f16_bits(v.x) | f16_bits(v.y) << 16, f16_bits(v.z) | f16_bits(v.w) << 16);
}
