// The CUDA launchers without torch, for compute-sanitizer (benchmarks/gpu.sh): small random shapes, every buffer
// exactly as long as it must be, results against plain loops on the host.
//   cuda_kernels [cases] [seed]
// Compiled with the host twin of CUDA (tests/ops/cuda_twin) it runs without a GPU: tests/ops/test_cuda_kernels.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "pack/pack_cuda.cu"
#include "token_logprob/token_logprob_cuda.cu"

namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "cuda_kernels: %s\n", what);
  std::exit(1);
}

void check(cudaError_t error) {
  if (error != cudaSuccess) fail(cudaGetErrorString(error));
}

// A copy on the device that begins `askew` bytes behind an aligned address and ends with the allocation.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host, size_t askew = 0) : OnDevice(host.size(), askew) {
    if (size_ > 0) check(cudaMemcpy(data(), host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Not initialised: whoever reads what no kernel wrote is found by initcheck.
  explicit OnDevice(size_t size, size_t askew = 0) : size_(size), askew_(askew) {
    if (size_ > 0) check(cudaMalloc(&start_, askew + size_ * sizeof(T)));
  }
  ~OnDevice() {
    if (start_ != nullptr) check(cudaFree(start_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* data() const { return reinterpret_cast<T*>(static_cast<uint8_t*>(start_) + askew_); }
  std::vector<T> host() const {
    std::vector<T> found(size_);
    check(cudaDeviceSynchronize());
    if (size_ > 0) check(cudaMemcpy(found.data(), data(), size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return found;
  }

 private:
  void* start_ = nullptr;
  size_t size_, askew_;
};

struct Random {
  std::mt19937_64 bits;

  int64_t to(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(bits); }
  double normal() { return std::normal_distribution<double>()(bits); }
  bool once_in(int64_t n) { return to(0, n - 1) == 0; }
};

// Pieces with gaps between them in the destination, from anywhere in the source.
std::vector<mdapo::pack::Piece> random_pieces(Random& random, int64_t source, int64_t* tokens) {
  std::vector<mdapo::pack::Piece> pieces;
  *tokens = random.to(0, 3);
  for (int64_t n = random.to(0, 6); n > 0; --n) {
    const int64_t count = random.to(1, std::min<int64_t>(source, random.once_in(3) ? 2000 : 40));
    pieces.push_back({*tokens, random.to(0, source - count), count});
    *tokens += count + (random.once_in(2) ? random.to(0, 9) : 0);
  }
  return pieces;
}

void check_copy(Random& random) {
  using namespace mdapo::pack;
  const int64_t source = random.to(1, 3000), items[] = {1, 2, 3, 4, 8, 20};
  int64_t tokens = 0;
  const std::vector<Piece> pieces = random_pieces(random, source, &tokens);
  if (tokens == 0) return;
  const OnDevice<Piece> on_device(pieces);
  CopyJob job{};
  job.pieces = on_device.data();
  job.num_pieces = static_cast<int64_t>(pieces.size());
  std::vector<std::vector<uint8_t>> inputs;
  std::vector<std::unique_ptr<OnDevice<uint8_t>>> from, to;
  for (const int64_t item : items) {
    std::vector<uint8_t> bytes(static_cast<size_t>(item * source));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
    from.push_back(std::make_unique<OnDevice<uint8_t>>(bytes, static_cast<size_t>(random.to(0, 15))));
    to.push_back(std::make_unique<OnDevice<uint8_t>>(static_cast<size_t>(item * tokens)));
    inputs.push_back(std::move(bytes));
    job.fields[job.num_fields++] = {from.back()->data(), to.back()->data(),           item * source,
                                    item * tokens,       static_cast<uint32_t>(item), job.num_blocks};
    job.num_blocks += static_cast<uint32_t>((item * tokens + kTileBytes - 1) / kTileBytes);
  }
  check(launch_copy(job, nullptr));
  for (size_t f = 0; f < inputs.size(); ++f) {
    const auto item = static_cast<size_t>(items[f]);
    std::vector<uint8_t> expected(item * static_cast<size_t>(tokens));
    for (const Piece& piece : pieces) {
      const auto start = inputs[f].begin() + piece.from * items[f];
      std::copy(start, start + piece.count * items[f], expected.begin() + piece.to * items[f]);
    }
    if (to[f]->host() != expected) fail("a copy differs");
  }
}

void check_mask_spans(Random& random) {
  const int64_t rows = random.to(1, 20), size = random.to(1, 300);
  std::vector<uint8_t> mask(static_cast<size_t>(rows * size));
  std::vector<int64_t> expected(static_cast<size_t>(3 * rows));
  for (int64_t row = 0; row < rows; ++row) {
    int64_t first = random.to(0, size - 1), end = random.to(first, size), ones = end - first;
    for (int64_t at = first; at < end; ++at) mask[row * size + at] = 1;
    const bool gap = ones > 2 && random.once_in(3);
    if (gap) mask[row * size + first + 1 + random.to(0, ones - 3)] = 0;
    expected[row] = ones == 0 ? 0 : first;
    expected[rows + row] = ones == 0 ? 0 : end;
    expected[2 * rows + row] = gap ? 1 : 0;
  }
  const OnDevice<uint8_t> on_device(mask, static_cast<size_t>(random.to(0, 15)));
  const OnDevice<int64_t> spans(expected.size());
  check(mdapo::pack::launch_mask_spans(on_device.data(), spans.data(), rows, size, nullptr));
  if (spans.host() != expected) fail("spans of a mask differ");
}

using namespace mdapo::token_logprob;

double widened(float v) { return v; }
double widened(double v) { return v; }
double widened(__nv_bfloat16 v) { return __bfloat162float(v); }
void narrowed(double v, float& to) { to = static_cast<float>(v); }
void narrowed(double v, double& to) { to = v; }
void narrowed(double v, __nv_bfloat16& to) { to = __float2bfloat16_rn(static_cast<float>(v)); }

void compare(double found, double expected, double tolerance, double size, const char* what) {
  if (found != expected && !(std::fabs(found - expected) <= tolerance * (size + std::fabs(expected)))) fail(what);
}

template <class T>
void check_tile(Random& random, Dtype dtype) {
  using A = Acc<T>;
  const int64_t rows = random.to(1, 5), cols = random.once_in(3) ? random.to(1, 3000) : random.to(1, 70);
  const int64_t stride = cols + (random.once_in(2) ? random.to(0, 8) : (-cols & 31)), first_id = random.to(0, 1000);
  const double temperature = random.once_in(2) ? 1.0 : 0.7, tolerance = sizeof(T) == 8 ? 1e-10 : 2e-5;
  std::vector<T> logits(static_cast<size_t>((rows - 1) * stride + cols));
  for (T& z : logits) narrowed(random.once_in(50) ? -INFINITY : 4 * random.normal(), z);
  std::vector<int64_t> targets(static_cast<size_t>(rows));
  for (int64_t& target : targets) target = first_id + random.to(-3, cols + 2);
  std::vector<A> stats(static_cast<size_t>(kStatsRows * rows), A(0));
  for (int64_t row = 0; row < rows; ++row) stats[row] = -INFINITY;

  const OnDevice<T> on_device(logits, sizeof(T) * static_cast<size_t>(random.to(0, 3)));
  const OnDevice<int64_t> ids(targets);
  const OnDevice<A> kept(stats);
  const DeviceTile job{
      {rows, cols, stride, first_id}, dtype, on_device.data(), ids.data(), kept.data(), rows, temperature};
  check(launch_stats(job, nullptr));
  stats = kept.host();

  std::vector<A> terms(static_cast<size_t>(kTermsRows * rows));
  for (int64_t row = 0; row < rows; ++row) {
    Partial<double> part = empty_partial<double>();
    for (int64_t c = 0; c < cols; ++c)
      part.largest = std::fmax(part.largest, widened(logits[row * stride + c]) / temperature);
    for (int64_t c = 0; c < cols; ++c)
      add(part, bounded(widened(logits[row * stride + c]) / temperature - base_of(part.largest)));
    compare(stats[row], part.largest, tolerance, 0, "the largest logit differs");
    compare(stats[kSum * rows + row], part.sum, tolerance, 0, "a sum differs");
    compare(stats[kMoment * rows + row], part.moment, tolerance, part.sum, "a moment differs");
    const int64_t column = column_of(job.tile, targets[row]);
    const double x = column < 0 ? 0 : widened(logits[row * stride + column]) / temperature;
    compare(stats[kTarget * rows + row], x, tolerance, 0, "a target's logit differs");
    const double log_sum = part.sum > 0 ? std::log(part.sum) : 0;
    const double of_row[] = {base_of(part.largest), log_sum, part.sum > 0 ? log_sum - part.moment / part.sum : 0,
                             random.normal(), random.once_in(2) ? 0 : random.normal()};
    for (int kind = 0; kind < kTermsRows; ++kind) terms[kind * rows + row] = A(of_row[kind]);
  }
  const OnDevice<A> known(terms);
  DeviceTile back = job;
  back.values = known.data();
  check(launch_gradient(back, nullptr));
  const std::vector<T> found = on_device.host();
  for (int64_t row = 0; row < rows; ++row) {
    const auto term = [&](int kind) { return static_cast<double>(terms[kind * rows + row]); };
    const RowTerms<double> of_row{term(kBase), term(kLogSum), term(kEntropy), term(kGradLogp), term(kGradEntropy)};
    const int64_t column = column_of(job.tile, targets[row]), end = row + 1 < rows ? stride : cols;
    for (int64_t c = 0; c < end; ++c) {
      const double z = widened(logits[row * stride + c]), is = widened(found[row * stride + c]);
      if (c >= cols) {
        if (z != is) fail("the kernel wrote behind a row");
        continue;
      }
      const double u = of_row.log_p(z / temperature);
      const double expected = of_row.idle() ? 0 : gradient(of_row, 1 / temperature, u, c == column);
      compare(is, expected, sizeof(T) == 2 ? 5e-3 : tolerance, sizeof(T) == 2 ? 1e-2 : 10, "a gradient differs");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 40;
  Random random{std::mt19937_64(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1)};
  for (int64_t i = 0; i < cases; ++i) {
    check_copy(random);
    check_mask_spans(random);
    check_tile<float>(random, Dtype::kFloat32);
    check_tile<__nv_bfloat16>(random, Dtype::kBfloat16);
    check_tile<double>(random, Dtype::kFloat64);
  }
  std::printf("cuda_kernels: %lld cases, no finding\n", static_cast<long long>(cases));
}
