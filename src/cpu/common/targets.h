// Which Highway targets the cpu kernels are built for. Include before any Highway header.
#pragma once

// AVX-512 with VNNI and VBMI is built only when asked.
#define HWY_WANT_AVX3_DL 1
// Kernels keep arrays of vectors, which scalable SVE vectors cannot be; SSE machines take the scalar target.
#define WEFT_NEVER_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
// Sanitizers make compilers three times as slow: the quick build with them leaves AVX-512 out, the full one watches one kind of it.
#if defined(WEFT_FEW_TARGETS)
#define HWY_DISABLED_TARGETS (WEFT_NEVER_TARGETS | HWY_AVX3 | HWY_AVX3_DL)
#elif defined(__SANITIZE_ADDRESS__)
#define HWY_DISABLED_TARGETS (WEFT_NEVER_TARGETS | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS WEFT_NEVER_TARGETS
#endif
