// WEFT_ANYWHERE marks what host code and device code both call; WEFT_EXEC_UNCHECKED before a template, that some of its instances are
// for the host alone.
#pragma once

#ifdef __CUDACC__
#define WEFT_ANYWHERE __host__ __device__
#define WEFT_EXEC_UNCHECKED _Pragma("nv_exec_check_disable")
#else
#define WEFT_ANYWHERE
#define WEFT_EXEC_UNCHECKED
#endif
