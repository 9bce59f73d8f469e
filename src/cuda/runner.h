// What the model runner may use of the cuda backend: devices and errors; in .cu files also launches and device functions.
#pragma once

#include "cuda/common/device.h"

#ifdef __CUDACC__
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"
#endif
