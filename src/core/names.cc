// Names of the public enums, and the version.
#include "weft/weft.h"

#define WEFT_TEXT_(x) #x
#define WEFT_TEXT(x) WEFT_TEXT_(x)

namespace weft {

const char* version() { return WEFT_TEXT(WEFT_VERSION_MAJOR) "." WEFT_TEXT(WEFT_VERSION_MINOR) "." WEFT_TEXT(WEFT_VERSION_PATCH); }

const char* code_name(Code code) {
  switch (code) {
    case Code::ok: return "ok";
    case Code::invalid_argument: return "invalid_argument";
    case Code::unsupported: return "unsupported";
    case Code::scratch_too_small: return "scratch_too_small";
    case Code::device_error: return "device_error";
  }
  return "?";
}

const char* dtype_name(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::u8: return "u8";
    case DType::u32: return "u32";
  }
  return "?";
}

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::reference: return "reference";
    case Backend::cpu: return "cpu";
    case Backend::cuda: return "cuda";
    case Backend::vulkan: return "vulkan";
  }
  return "?";
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::best: return "best";
    case Isa::scalar: return "scalar";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512_vnni: return "avx512_vnni";
    case Isa::neon: return "neon";
  }
  return "?";
}

const char* speed_name(Speed speed) {
  switch (speed) {
    case Speed::fast: return "fast";
    case Speed::portable: return "portable";
    case Speed::slow: return "slow";
  }
  return "?";
}

}  // namespace weft
