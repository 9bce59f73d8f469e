// WEFT_HOST_DEVICE marks what host code and device code both call; WEFT_EXEC_UNCHECKED before a template, that some of its instances are
// for the host alone.
#pragma once

#ifdef __CUDACC__
#define WEFT_HOST_DEVICE __host__ __device__
#define WEFT_EXEC_UNCHECKED _Pragma("nv_exec_check_disable")
#else
#define WEFT_HOST_DEVICE
#define WEFT_EXEC_UNCHECKED
#endif
