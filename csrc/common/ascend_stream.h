// What an Ascend binding asks of torch-npu and the runtime: its place in the stream's order, and the number of cores.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <functional>

#ifdef MDAPO_ASCEND_TWIN

namespace mdapo {

inline uint32_t vector_cores() { return 5; }

inline void enqueue(const char*, const std::function<void(void*)>& launch) { launch(nullptr); }

}  // namespace mdapo

#else

#include <acl/acl.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

namespace mdapo {

// Vector cores of the current device, asked of the runtime once.
inline uint32_t vector_cores() {
  static const uint32_t count = [] {
    int32_t device = 0;
    int64_t cores = 0;
    STD_TORCH_CHECK(aclrtGetDevice(&device) == ACL_SUCCESS, "no current Ascend device");
    const auto asked = aclGetDeviceCapability(static_cast<uint32_t>(device), ACL_DEVICE_INFO_VECTOR_CORE_NUM, &cores);
    STD_TORCH_CHECK(asked == ACL_SUCCESS && cores > 0, "the number of vector cores is not known");
    return static_cast<uint32_t>(cores);
  }();
  return count;
}

// Takes its turn in torch-npu's queue, which another thread empties: `launch` holds by value all that it needs.
inline void enqueue(const char* name, std::function<void(void*)> launch) {
  void* stream = c10_npu::getCurrentNPUStream().stream(false);
  at_npu::native::OpCommand::RunOpApiV2(name, [launch = std::move(launch), stream]() -> int {
    launch(stream);
    return 0;
  });
}

}  // namespace mdapo

#endif
