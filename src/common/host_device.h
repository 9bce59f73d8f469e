// Marks for functions that host and device code share.
//
// WEFT_HOST_DEVICE: both call the function. WEFT_EXEC_UNCHECKED, before a template: some of its instances are for the host alone.
#pragma once

#ifdef __CUDACC__
#define WEFT_HOST_DEVICE __host__ __device__
#define WEFT_EXEC_UNCHECKED _Pragma("nv_exec_check_disable")
#else
#define WEFT_HOST_DEVICE
#define WEFT_EXEC_UNCHECKED
#endif
