// TPipe, TQue, TBuf, flags and barriers. A queue orders its producer and its consumer, and nothing else.
#pragma once

#include "tensors.h"

namespace AscendC {

constexpr int producer_of(TPosition position) {
  return position == TPosition::VECIN ? ascend_twin::kIn : ascend_twin::kVector;
}
constexpr int consumer_of(TPosition position) {
  return position == TPosition::VECIN ? ascend_twin::kVector : ascend_twin::kOut;
}

template <TPosition kFrom, TPosition kTo, int32_t kDepth>
class TQueBind {
 public:
  static constexpr int kProducer = producer_of(kFrom);
  static constexpr int kConsumer = consumer_of(kTo);

  ~TQueBind() noexcept(false) {
    for (const Slot& slot : slots)
      if (slot.state != State::kFree) ascend_twin::core().open.push_back("a queue's tensor was not freed");
  }

  template <class T>
  LocalTensor<T> AllocTensor() {
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i].state != State::kFree) continue;
      slots[i].state = State::kTaken;
      ascend_twin::merge(ascend_twin::core().seen[kProducer], slots[i].clock);
      return LocalTensor<T>(slots[i].begin, bytes, id(), static_cast<int>(i));
    }
    ascend_twin::fail("AllocTensor of a queue without a free buffer: it would hang");
  }
  template <class T>
  bool EnQue(const LocalTensor<T>& tensor) {
    Slot& slot = own(tensor, State::kTaken, "EnQue");
    ascend_twin::require(waiting.size() < static_cast<size_t>(kDepth), "EnQue past the depth of the queue");
    slot.state = State::kQueued;
    slot.clock = ascend_twin::done_by(kProducer);
    waiting.push_back(tensor.slot);
    return true;
  }
  template <class T>
  LocalTensor<T> DeQue() {
    ascend_twin::require(!waiting.empty(), "DeQue of an empty queue: it would hang");
    const int i = waiting.front();
    waiting.erase(waiting.begin());
    slots[i].state = State::kOut;
    ascend_twin::merge(ascend_twin::core().seen[kConsumer], slots[i].clock);
    return LocalTensor<T>(slots[i].begin, bytes, id(), i);
  }
  template <class T>
  void FreeTensor(const LocalTensor<T>& tensor) {
    Slot& slot = own(tensor, State::kOut, "FreeTensor");
    slot.state = State::kFree;
    slot.clock = ascend_twin::done_by(kConsumer);
  }

  void init(uint8_t number, size_t each) {
    bytes = each;
    number_of_queue = ++ascend_twin::machine().queues;
    for (int i = 0; i < number; ++i) slots.push_back({});
  }
  void place(size_t i, size_t begin) { slots[i].begin = begin; }

 private:
  enum class State { kFree, kTaken, kQueued, kOut };
  struct Slot {
    size_t begin = 0;
    State state = State::kFree;
    ascend_twin::Clock clock{};
  };

  template <class T>
  Slot& own(const LocalTensor<T>& tensor, State state, const char* what) {
    ascend_twin::require(tensor.owner == id() && tensor.slot >= 0, std::string(what) + " of another queue's tensor");
    Slot& slot = slots[static_cast<size_t>(tensor.slot)];
    ascend_twin::require(slot.state == state, std::string(what) + " of a tensor in the wrong state");
    return slot;
  }
  int id() const { return number_of_queue; }

  std::vector<Slot> slots;
  std::vector<int> waiting;
  size_t bytes = 0;
  int number_of_queue = 0;
};

template <TPosition kPosition, int32_t kDepth>
using TQue = TQueBind<kPosition, kPosition, kDepth>;

template <TPosition kPosition = TPosition::VECCALC>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() const {
    return LocalTensor<T>(begin, bytes);
  }
  size_t begin = 0, bytes = 0;
};

class TPipe {
 public:
  template <TPosition kFrom, TPosition kTo, int32_t kDepth>
  bool InitBuffer(TQueBind<kFrom, kTo, kDepth>& queue, uint8_t number, uint32_t bytes) {
    queue.init(number, rounded(bytes));
    for (uint8_t i = 0; i < number; ++i) queue.place(i, take(rounded(bytes)));
    return true;
  }
  template <TPosition kPosition>
  bool InitBuffer(TBuf<kPosition>& buffer, uint32_t bytes) {
    buffer.bytes = rounded(bytes);
    buffer.begin = take(buffer.bytes);
    return true;
  }
  int32_t FetchEventID(HardEvent) { return 0; }

 private:
  static size_t rounded(size_t bytes) {
    return (bytes + ascend_twin::kBlockBytes - 1) / ascend_twin::kBlockBytes * ascend_twin::kBlockBytes;
  }
  static size_t take(size_t bytes) {
    auto& core = ascend_twin::core();
    const size_t begin = core.allocated;
    core.allocated += bytes;
    ascend_twin::require(core.allocated <= ascend_twin::kUbBytes, "UB has " + std::to_string(ascend_twin::kUbBytes) +
                                                                      " bytes, the kernel asks for " +
                                                                      std::to_string(core.allocated) + " or more");
    return begin;
  }
};

inline TPipe* GetTPipePtr() {
  static TPipe pipe;
  return &pipe;
}

// From and to of an event.
constexpr std::pair<int, int> ends_of(HardEvent event) {
  using namespace ascend_twin;
  constexpr std::pair<int, int> kEnds[] = {{kVector, kScalar}, {kScalar, kVector}, {kIn, kVector}, {kVector, kIn},
                                           {kVector, kOut},    {kOut, kVector},    {kIn, kScalar}, {kScalar, kIn},
                                           {kScalar, kOut},    {kOut, kScalar},    {kIn, kOut},    {kOut, kIn}};
  return kEnds[static_cast<int>(event)];
}

template <HardEvent kEvent>
void SetFlag(int32_t id) {
  using namespace ascend_twin;
  require(id >= 0 && id < 8, "an event id outside of 0 to 7");
  const bool is_new = core().flags.insert({{static_cast<int>(kEvent), id}, done_by(ends_of(kEvent).first)}).second;
  require(is_new, "a flag is set twice without a wait");
}

template <HardEvent kEvent>
void WaitFlag(int32_t id) {
  using namespace ascend_twin;
  const auto found = core().flags.find({static_cast<int>(kEvent), id});
  require(found != core().flags.end(), "WaitFlag of a flag that is not set: it would hang");
  merge(core().seen[ends_of(kEvent).second], found->second);
  core().flags.erase(found);
}

template <pipe_t kPipe>
void PipeBarrier() {
  if (kPipe == PIPE_ALL) return ascend_twin::barrier_of_all();
  ascend_twin::barrier(static_cast<int>(kPipe));
}

}  // namespace AscendC
