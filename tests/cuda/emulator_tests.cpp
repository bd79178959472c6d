// The emulator against itself: it must see what is wrong, and multiply as the PTX ISA says.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cuda/core/ptx.cuh"

namespace {

using namespace qfx::cuda;
namespace emulated = qfx::emulated;

int failures = 0;

void expect(bool right, const char* what) {
  if (right) return;
  std::printf("FAILED: %s\n", what);
  ++failures;
}

// The sentence of the fault in `run`, empty without one.
template <typename F>
std::string fault_of(const F& run) {
  try {
    run();
  } catch (const emulated::Fault& fault) {
    return fault.what();
  }
  return "";
}

// --- order ---

template <bool kBarrier>
__global__ void reverse(const int* in, int* out) {
  int* shared = dynamic_shared<int>();
  shared[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  if (kBarrier) __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

template <bool kBarrier>
bool reverses() {
  constexpr int kThreads = 96, kBlocks = 5;
  std::vector<int> in(kThreads * kBlocks), out(in.size());
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i) + 1;
  launch(reverse<kBarrier>, kBlocks, kThreads, kThreads * sizeof(int), nullptr, in.data(),
         out.data());
  for (int b = 0; b < kBlocks; ++b) {
    for (int i = 0; i < kThreads; ++i) {
      if (out[b * kThreads + i] != in[b * kThreads + kThreads - 1 - i]) return false;
    }
  }
  return true;
}

void missing_barrier() {
  expect(reverses<true>(), "a reversal with a barrier is right");
  expect(!reverses<false>(), "a reversal without its barrier is wrong");
}

struct Stale {
  int value;
};

__global__ void stale_shared(int* out) {
  Stale& s = static_shared<Stale>();
  out[blockIdx.x] = s.value;
  s.value = 7;
}

void shared_memory_is_poison() {
  int out[3] = {};
  launch(stale_shared, 3, 1, 0, nullptr, out);
  for (int value : out) expect(value == static_cast<int>(0xcbcbcbcb), "a block sees no other's");
}

// --- clusters ---

// Each thread writes into the memory of the cluster's next block, and reads what it was given.
template <bool kMeet>
__global__ void hand_on(int* out) {
  const unsigned next = (emulated::block_in_cluster() + 1) % 4;
  emulated::in_block(
      next, [] { dynamic_shared<int>()[threadIdx.x] = int(blockIdx.x * 100 + threadIdx.x); });
  if (kMeet) emulated::sync_cluster();
  out[blockIdx.x * blockDim.x + threadIdx.x] = dynamic_shared<int>()[threadIdx.x];
  emulated::sync_cluster();
}

template <bool kMeet>
bool hands_on() {
  constexpr unsigned kThreads = 40, kBlocks = 8;
  std::vector<int> out(kThreads * kBlocks);
  launch<4>(hand_on<kMeet>, kBlocks, kThreads, kThreads * sizeof(int), nullptr, out.data());
  for (unsigned b = 0; b < kBlocks; ++b) {
    const unsigned from = b / 4 * 4 + (b + 3) % 4;
    for (unsigned i = 0; i < kThreads; ++i) {
      if (out[b * kThreads + i] != static_cast<int>(from * 100 + i)) return false;
    }
  }
  return true;
}

void clusters_meet() {
  expect(hands_on<true>(), "blocks of a cluster reach each other's memory");
  expect(!hands_on<false>(), "the other block's memory before it was written");
}

__global__ void reaches_over() {  // the last one finds the other gone
  emulated::in_block(1 - emulated::block_in_cluster(), [] {});
}

__global__ void second_block_waits() {
  if (blockIdx.x % 2 == 1) emulated::wait_until([] { return false; }, "a promise");
  emulated::sync_cluster();
}

__global__ void beyond_the_cluster() {
  emulated::in_block(2, [] {});
}

void clusters_that_fail() {
  const auto expect_fault = [](const std::string& part, const std::string& text) {
    expect(text.find(part) != std::string::npos, (part + ": " + text).c_str());
  };
  const std::string exited = fault_of([] { launch<2>(reaches_over, 2, 1, 0, nullptr); });
  expect_fault("which has exited", exited);
  expect_fault("an access to block (", exited);
  expect_fault(
      "block (0, 0, 0): threads 0-31 wait for the cluster; in block (1, 0, 0): threads 0-31 "
      "wait for a promise",
      fault_of([] { launch<2>(second_block_waits, 2, 32, 0, nullptr); }));
  expect_fault("block 2 of a cluster of 2",
               fault_of([] { launch<2>(beyond_the_cluster, 2, 1, 0, nullptr); }));
  expect_fault("clusters of 2 blocks in a grid of (3, 1, 1)",
               fault_of([] { launch<2>(reaches_over, 3, 1, 0, nullptr); }));
  expect(hands_on<true>(), "the next cluster runs after a fault");
}

// --- what is refused ---

__global__ void half_waits() {
  if (threadIdx.x < 32) __syncthreads();
  if (threadIdx.x >= 32 && threadIdx.x < 48) barrier_sync(3, 64);
  if (threadIdx.x >= 48) emulated::wait_until([] { return false; }, "a promise");
}

void deadlock_names_who_waits_for_what() {
  const std::string text = fault_of([] { launch(half_waits, dim3(1, 2), 64, 0, nullptr); });
  for (const char* part :
       {"deadlock in block (0, ", "threads 0-31 wait for __syncthreads",
        "threads 32-47 wait for barrier 3 of 64 threads", "threads 48-63 wait for a promise"}) {
    expect(text.find(part) != std::string::npos, (part + (": " + text)).c_str());
  }
  expect(reverses<true>(), "the next kernel runs after a deadlock");
}

__global__ void writes(int byte) {
  if (threadIdx.x == 1) dynamic_shared<char>()[byte] = 1;
}

void writes_beyond_shared_memory() {
  expect(fault_of([] { launch(writes, 1, 2, 100, nullptr, 99); }).empty(),
         "the last byte is there");
#if !defined(__SANITIZE_ADDRESS__)  // which ends the program
  const std::string text = fault_of([] { launch(writes, 1, 2, 100, nullptr, 100); });
  expect(text.find("wrote to byte 100 of its 100 bytes") != std::string::npos, text.c_str());
#endif
}

__global__ void misaligned(const char* p, unsigned* out) {
  *out = load_once(reinterpret_cast<const unsigned*>(p));
}

__global__ void ends_early() {
  emulated::defer([] {});
}

__global__ void mixed_warp() {
  if (threadIdx.x < 16) {
    __syncwarp();
  } else {
    __shfl_xor_sync(kAllLanes, 1, 1);
  }
}

void faults_are_sentences() {
  alignas(4) char bytes[8] = {};
  unsigned out = 0;
  const std::string load = fault_of([&] { launch(misaligned, 1, 1, 0, nullptr, bytes + 1, &out); });
  expect(load.find("thread 0: access of 4 bytes") != std::string::npos, load.c_str());
  const std::string copy = fault_of([] { launch(ends_early, 1, 3, 0, nullptr); });
  expect(copy.find("asynchronous copies") != std::string::npos, copy.c_str());
  const std::string warp = fault_of([] { launch(mixed_warp, 1, 32, 0, nullptr); });
  expect(warp.find("while others of the warp wait for") != std::string::npos, warp.c_str());
  expect(!fault_of([] { launch(mixed_warp, 0, 32, 0, nullptr); }).empty(), "an empty grid");
  expect(!fault_of([] { launch(mixed_warp, 1, 1025, 0, nullptr); }).empty(), "1025 threads");
  expect(!fault_of([] { launch(mixed_warp, 1, 32, 300 << 10, nullptr); }).empty(), "300 KB");
}

// --- waiting that ends ---

__global__ void hand_over(int* out) {  // a producer warp, a consumer warp, named barriers
  int* box = dynamic_shared<int>();
  for (int round = 0; round < 20; ++round) {
    if (threadIdx.x < 32) {
      if (round > 0) barrier_sync(2, 64);  // taken
      box[threadIdx.x] = round * 100 + static_cast<int>(threadIdx.x);
      barrier_arrive(1, 64);
    } else {
      barrier_sync(1, 64);
      out[round * 32 + threadIdx.x - 32] = box[63 - threadIdx.x];
      if (round < 19) barrier_arrive(2, 64);
    }
  }
}

void named_barriers() {
  std::vector<int> out(20 * 32, -1);
  launch(hand_over, 1, 64, 128, nullptr, out.data());
  bool right = true;
  for (int i = 0; i < 20 * 32; ++i) right &= out[i] == i / 32 * 100 + 31 - i % 32;
  expect(right, "a box that changes hands by named barriers");
}

__global__ void deferred(bool wait, int* out) {
  int* box = dynamic_shared<int>();
  volatile int* full = box + 1;
  if (threadIdx.x == 0) *full = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    emulated::defer([=] {
      box[0] = 42;
      *full = 1;
    });
  }
  if (wait) emulated::wait_until([=] { return *full == 1; }, "the box");
  out[threadIdx.x] = box[0];
}

void deferred_actions() {
  std::vector<int> out(64);
  launch(deferred, 1, 64, 8, nullptr, true, out.data());
  expect(out == std::vector<int>(64, 42), "who waits sees what was deferred");
  const std::string early =
      fault_of([&] { launch(deferred, 1, 64, 8, nullptr, false, out.data()); });
  expect(!early.empty() || out != std::vector<int>(64, 42), "who does not wait may not see it");
}

// Thread i copies 16 bytes in each of two groups and waits for the first one alone.
template <int kLeft>
__global__ void copies(const int4* from, int4* out) {
  int4* shared = dynamic_shared<int4>();
  const unsigned i = threadIdx.x;
  for (unsigned group = 0; group < 2; ++group) {
    copy_async(shared + 2 * i + group, from + 2 * i + group, group == 0 ? 16 : 5);
    copy_async_commit();
  }
  copy_async_wait<kLeft>();
  out[2 * i] = shared[2 * i];
  out[2 * i + 1] = shared[2 * i + 1];
}

void asynchronous_copies() {
  constexpr int kThreads = 64;
  std::vector<int4> from(2 * kThreads, int4{1, 0x02030405, 3, 4}), out(from.size());
  const auto arrived = [&] {
    int second = 0;
    for (int i = 0; i < kThreads; ++i) {
      expect(out[2 * i].w == 4, "a group that is waited for has arrived");
      second += out[2 * i + 1].x == 1 && out[2 * i + 1].y == 5 && out[2 * i + 1].w == 0;
    }
    return second;
  };
  launch(copies<0>, 1, kThreads, sizeof(int4) * 2 * kThreads, nullptr, from.data(), out.data());
  expect(arrived() == kThreads, "5 bytes and zeros");
  launch(copies<1>, 1, kThreads, sizeof(int4) * 2 * kThreads, nullptr, from.data(), out.data());
  const int some = arrived();
  expect(some > 0 && some < kThreads, "the other group comes late, sometimes");
}

// --- warps ---

__global__ void warp_functions(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int sum = lane;
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(kAllLanes, sum, i);
  out[lane * 4] = sum;
  out[lane * 4 + 1] = __shfl_down_sync(kAllLanes, lane, 3, 8);
  out[lane * 4 + 2] = static_cast<int>(__ballot_sync(kAllLanes, lane % 3 == 0));
  if (lane >= 8) out[lane * 4 + 3] = __shfl_sync(0xffffff00u, lane, lane < 16 ? 9 : 20);
}

void warps() {
  int out[128] = {};
  launch(warp_functions, 1, 32, 0, nullptr, out);
  for (int lane = 0; lane < 32; ++lane) {
    expect(out[lane * 4] == 496, "the sum of a warp");
    expect(out[lane * 4 + 1] == (lane % 8 < 5 ? lane + 3 : lane), "down within eight lanes");
    expect(out[lane * 4 + 2] == 0x49249249, "a ballot");
    if (lane >= 8) expect(out[lane * 4 + 3] == (lane < 16 ? 9 : 20), "a part of the lanes");
  }
}

__global__ void count_up(int* counter, unsigned* most) {
  atomicAdd(counter, 3);
  atomicMax(most, threadIdx.x + 100 * blockIdx.x);
}

void atomics() {
  int counter = 0;
  unsigned most = 0;
  launch(count_up, 7, 100, 0, nullptr, &counter, &most);
  expect(counter == 2100 && most == 699, "atomic operations");
  expect(__dp4a(static_cast<int>(0x80ff017f), 0x7f02ff80, 5) == -128 * 127 - 2 - 1 - 127 * 128 + 5,
         "dp4a");
  expect(__byte_perm(0x33221100, 0x77665544, 0x0c71) == 0x00007711u, "byte_perm");
}

// --- products ---

using Bytes = std::vector<int8_t>;

Bytes random_bytes(size_t count) {
  static std::mt19937 generator(1);
  Bytes bytes(count);
  for (int8_t& b : bytes) b = static_cast<int8_t>(generator());
  return bytes;
}

unsigned word_at(const int8_t* p) {
  unsigned word;
  std::memcpy(&word, p, 4);
  return word;
}

// a [16][32], b [8][32] (k is last), d [16][8], read and written as the PTX ISA lays them out.
__global__ void product_32(const int8_t* a, const int8_t* b, int* d) {
  const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
  const unsigned of_a[4] = {word_at(a + g * 32 + 4 * t), word_at(a + (g + 8) * 32 + 4 * t),
                            word_at(a + g * 32 + 4 * t + 16),
                            word_at(a + (g + 8) * 32 + 4 * t + 16)};
  const unsigned of_b[2] = {word_at(b + g * 32 + 4 * t), word_at(b + g * 32 + 4 * t + 16)};
  int of_d[4] = {1, 1, 1, 1};
  mma_s8_16x8x32(of_d, of_a, of_b);
  for (unsigned i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = of_d[i];
}

// The same with a by ldmatrix, of which a row is 32 bytes in shared memory.
__global__ void product_by_ldmatrix(const int8_t* a, const int8_t* b, int* d) {
  int8_t* shared = dynamic_shared<int8_t>();
  const unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
  copy_async(shared + lane * 16, a + lane * 16);
  copy_async_commit();
  copy_async_wait<0>();
  __syncwarp();
  unsigned of_a[4];
  load_matrices(of_a, shared + lane % 16 * 32 + lane / 16 * 16);
  const unsigned of_b[2] = {word_at(b + g * 32 + 4 * t), word_at(b + g * 32 + 4 * t + 16)};
  int of_d[4] = {1, 1, 1, 1};
  mma_s8_16x8x32(of_d, of_a, of_b);
  for (unsigned i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = of_d[i];
}

__global__ void product_16(const int8_t* a, const int8_t* b, int* d) {  // a, b [8][16], d [8][8]
  const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
  int of_d[2] = {1, 1};
  mma_s8_8x8x16(of_d, word_at(a + g * 16 + 4 * t), word_at(b + g * 16 + 4 * t));
  for (unsigned i = 0; i < 2; ++i) d[g * 8 + 2 * t + i] = of_d[i];
}

__global__ void product_of_bits(const int8_t* a, const int8_t* b, int* d) {  // rows of 32 bytes
  const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
  const unsigned of_a[4] = {word_at(a + g * 32 + 4 * t), word_at(a + (g + 8) * 32 + 4 * t),
                            word_at(a + g * 32 + 4 * t + 16),
                            word_at(a + (g + 8) * 32 + 4 * t + 16)};
  const unsigned of_b[2] = {word_at(b + g * 32 + 4 * t), word_at(b + g * 32 + 4 * t + 16)};
  int of_d[4] = {1, 1, 1, 1};
  mma_b1_16x8x256(of_d, of_a, of_b);
  for (unsigned i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = of_d[i];
}

using Product = void (*)(const int8_t*, const int8_t*, int*);

// of(a, b): what one byte of each adds.
void multiplies(const char* name, Product kernel, int rows, int depth, int (*of)(int, int)) {
  const Bytes a = random_bytes(static_cast<size_t>(rows * depth)), b = random_bytes(8 * depth);
  std::vector<int> d(static_cast<size_t>(rows) * 8);
  launch(kernel, 1, 32, 512, nullptr, a.data(), b.data(), d.data());
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < 8; ++n) {
      int sum = 1;
      for (int k = 0; k < depth; ++k) sum += of(a[m * depth + k], b[n * depth + k]);
      expect(d[m * 8 + n] == sum, name);
    }
  }
}

void products() {
  const auto times = [](int a, int b) { return a * b; };
  const auto common_bits = [](int a, int b) { return __popc(a & b & 0xff); };
  multiplies("m16n8k32", product_32, 16, 32, times);
  multiplies("m16n8k32 by ldmatrix", product_by_ldmatrix, 16, 32, times);
  multiplies("m8n8k16", product_16, 8, 16, times);
  multiplies("m16n8k256 of bits", product_of_bits, 16, 32, common_bits);
}

struct Test {
  const char* name;
  void (*run)();
};
constexpr Test kTests[] = {
    {"missing_barrier", missing_barrier},
    {"shared_memory_is_poison", shared_memory_is_poison},
    {"clusters_meet", clusters_meet},
    {"clusters_that_fail", clusters_that_fail},
    {"deadlock_names_who_waits_for_what", deadlock_names_who_waits_for_what},
    {"writes_beyond_shared_memory", writes_beyond_shared_memory},
    {"faults_are_sentences", faults_are_sentences},
    {"named_barriers", named_barriers},
    {"deferred_actions", deferred_actions},
    {"asynchronous_copies", asynchronous_copies},
    {"warps", warps},
    {"atomics", atomics},
    {"products", products},
};

}  // namespace

int main() {
  for (int seed = 0; seed < 20; ++seed) {
    emulated::set_seed(seed);
    for (const Test& test : kTests) {
      const int before = failures;
      test.run();
      if (seed == 19 && failures == before) std::printf("%s ok\n", test.name);
    }
  }
  return failures == 0 ? 0 : 1;
}
