// The Highway targets that cpu kernels are built for. Include this file before any Highway header.
#pragma once

// Highway builds the target with AVX-512 VNNI and VBMI only on request.
#define HWY_WANT_AVX3_DL 1
// SVE is left out because kernels hold arrays of vectors, which sizeless SVE types cannot form. Machines with only SSE use the
// scalar target.
#define WEFT_NEVER_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
// Compilation takes three times as long with sanitizers. The quick sanitizer build leaves AVX-512 out; the full one keeps one
// AVX-512 target.
#if defined(WEFT_FEW_TARGETS)
#define HWY_DISABLED_TARGETS (WEFT_NEVER_TARGETS | HWY_AVX3 | HWY_AVX3_DL)
#elif defined(__SANITIZE_ADDRESS__)
#define HWY_DISABLED_TARGETS (WEFT_NEVER_TARGETS | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS WEFT_NEVER_TARGETS
#endif
