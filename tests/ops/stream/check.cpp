// Streamed copies and zeros against memcpy, for every instruction set of this machine: each start and length around a
// line, and nothing beside what was asked for. Prints how many sets it checked.
#include <cstdio>
#include <vector>

#include "common/stream.h"

using namespace mdapo;

namespace {

bool right(const Lines& lines) {
  std::vector<uint8_t> from(1024), next(300);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(1 + i % 251);
  for (int64_t start = 0; start < 70; ++start) {
    for (const int64_t size : {0, 1, 63, 64, 65, 127, 128, 200, 511, 640}) {
      for (const bool zeros : {false, true}) {
        std::vector<uint8_t> to(1024, 255), wanted = to;
        if (zeros) {
          std::memset(wanted.data() + start, 0, static_cast<size_t>(size));
          stream_zeros(to.data() + start, size, lines);
        } else {
          std::memcpy(wanted.data() + start, from.data() + 3 * start, static_cast<size_t>(size));
          stream_copy(to.data() + start, from.data() + 3 * start, size, next.data(), 300, lines);
        }
        stream_fence();
        if (to != wanted) {
          std::printf("start %lld, size %lld, zeros %d\n", static_cast<long long>(start), static_cast<long long>(size),
                      zeros);
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  std::vector<Lines> sets = {lines_of_cpu(), kPlainLines};
#if defined(MDAPO_STREAM)
  sets.push_back({copy_lines, zero_lines});
#endif
  for (const Lines& lines : sets) {
    if (!right(lines)) return 1;
  }
  std::printf("%zu\n", sets.size());
  return 0;
}
