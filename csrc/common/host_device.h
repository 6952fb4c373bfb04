// Marks functions that host and device compilers both read.
#pragma once

#ifdef __CUDACC__
#define MDAPO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MDAPO_HOST_DEVICE inline
#endif
