// What the model runner may use of the cpu backend: threads, instruction sets and the vector functions of each target.
//
// A file that only spreads work over threads includes this header and nothing else. A file with kernels defines HWY_TARGET_INCLUDE
// as its own path before it includes this header, which then compiles that file once per target. There is no include guard here:
// every header below has its own, and the vector functions are needed again for every target.
#include "cpu/common/targets.h"  // first: decides which targets Highway builds

#ifdef HWY_TARGET_INCLUDE
#include <hwy/foreach_target.h>  // before any other Highway header

#include "cpu/common/simd-inl.h"
#endif

#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
