// What the model runner may use of the cuda backend: devices and errors on the host; typed loads, tensor-core products and launches in kernels.
#pragma once

#include "cuda/common/device.h"

#ifdef __CUDACC__
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"
#endif
