// Marks functions that host and device compilers both read. Ascend C kernels say what it is before (ascend_kernel.h).
#pragma once

#ifdef __CUDACC__
#define MDAPO_HOST_DEVICE __host__ __device__ __forceinline__
#elif !defined(MDAPO_HOST_DEVICE)
#define MDAPO_HOST_DEVICE inline
#endif
