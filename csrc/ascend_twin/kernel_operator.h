// A host twin of the part of the Ascend C API that csrc's kernels use: the very same kernel source compiles with g++
// and runs on the CPU against the vectors of the other backends. Written from Huawei's public API documentation;
// api_manifest.json names the page of each function. README.md says what this shows and what it does not.
#pragma once

#include "copy.h"
#include "queues.h"
#include "vector.h"

namespace ascend_twin {

// Runs a kernel on `cores` cores, one after the other. Throws Failure.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t cores, Arguments... arguments) {
  Machine& m = machine();
  for (GlobalBuffer& buffer : m.buffers) std::fill(buffer.writer.begin(), buffer.writer.end(), 0);
  m.count = cores;
  for (m.index = 0; m.index < cores; ++m.index) {
    m.core = Core();
    kernel(static_cast<Parameters>(arguments)...);
    finish_core();
  }
}

}  // namespace ascend_twin
