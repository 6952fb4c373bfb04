// What every Ascend C kernel includes first. With MDAPO_ASCEND_TWIN, kernel_operator.h is that of csrc/ascend_twin.
#pragma once

#include "kernel_operator.h"

#define MDAPO_HOST_DEVICE __aicore__ inline

// kernel(arguments...) on `cores` cores, in the order of `stream`.
#ifdef MDAPO_ASCEND_TWIN
#define MDAPO_LAUNCH(kernel, cores, stream, ...) \
  (static_cast<void>(stream), ascend_twin::launch(kernel, cores, __VA_ARGS__))
#else
#define MDAPO_LAUNCH(kernel, cores, stream, ...) kernel<<<cores, nullptr, stream>>>(__VA_ARGS__)
#endif

namespace mdapo {

// Everything that the first pipe of the event was given so far is done before what the second one is given from now on.
template <AscendC::HardEvent kEvent>
__aicore__ inline void wait_for() {
  const auto id = static_cast<event_t>(AscendC::GetTPipePtr()->FetchEventID(kEvent));
  AscendC::SetFlag<kEvent>(id);
  AscendC::WaitFlag<kEvent>(id);
}

// A vector instruction sees what the ones before wrote, and writes over what they have read.
__aicore__ inline void then() { AscendC::PipeBarrier<PIPE_V>(); }

}  // namespace mdapo
