// WEFT_ANYWHERE marks what host code and device code both call.
#pragma once

#ifdef __CUDACC__
#define WEFT_ANYWHERE __host__ __device__
#else
#define WEFT_ANYWHERE
#endif
