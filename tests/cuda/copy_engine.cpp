#include "copy_engine.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <vector>

#include "fibers.h"

namespace qfx::emulated {
namespace {

constexpr uint64_t kMark = 0x15a5a, kEncoded = 0x7fc0de5eed;
constexpr uint32_t kSwizzleSpan = 1024;

// What cuTensorMapEncodeTiled writes. Sizes and strides in bytes, the innermost first.
struct EncodedMap {
  uint64_t mark;
  const unsigned char* address;
  uint64_t sizes[3], strides[2];
  uint32_t box[3];

  uint32_t box_bytes() const { return box[0] * box[1] * box[2]; }
};

const EncodedMap* encoded(const CUtensorMap* map) {
  const EncodedMap* found = reinterpret_cast<const EncodedMap*>(map);
  if (found->mark != kEncoded) fault("a tensor map that nobody has encoded");
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0)
    fault("a tensor map at an address that is no multiple of 64");
  return found;
}

std::string name_of(const void* barrier) {
  return "the barrier at byte " + std::to_string(address_of(barrier)) + " of shared memory of " +
         block_name();
}

BarrierState load(const void* barrier) {
  BarrierState state;
  std::memcpy(&state, barrier, sizeof(state));
  if (state.mark != kMark) fault(name_of(barrier) + " was not initialized, or was overwritten");
  return state;
}

// The phase ends when all have arrived and all bytes have come.
void store(void* barrier, BarrierState state) {
  if (state.pending == 0 && state.bytes == 0) {
    state.phase ^= 1;
    state.pending = state.expected;
  }
  std::memcpy(barrier, &state, sizeof(state));
}

std::vector<void*>& not_shown() {
  static std::vector<void*> barriers[kMaxCluster];
  static const bool registered = (at_block_start([](unsigned b) { barriers[b].clear(); }), true);
  (void)registered;
  return barriers[block_in_cluster()];
}

// One row of a box: the bytes that are in the tensor, then zeros.
void copy_row(const EncodedMap& map, const int64_t (&at)[3], uint32_t to) {
  const bool inside = at[1] >= 0 && at[1] < static_cast<int64_t>(map.sizes[1]) && at[2] >= 0 &&
                      at[2] < static_cast<int64_t>(map.sizes[2]);
  for (uint32_t i = 0; i < map.box[0]; ++i) {
    const int64_t k = at[0] + i;
    const bool there = inside && k >= 0 && k < static_cast<int64_t>(map.sizes[0]);
    const int64_t from = k + at[1] * static_cast<int64_t>(map.strides[0]) +
                         at[2] * static_cast<int64_t>(map.strides[1]);
    *shared_bytes_at(swizzled(to + i), 1) = there ? map.address[from] : 0;
  }
}

void copy_box(const EncodedMap& map, const int64_t (&at)[3], uint32_t to) {
  for (uint32_t l = 0; l < map.box[2]; ++l) {
    for (uint32_t r = 0; r < map.box[1]; ++r, to += map.box[0]) {
      copy_row(map, {at[0], at[1] + r, at[2] + l}, to);
    }
  }
}

void arrive_now(void* barrier, int64_t expected_bytes) {
  BarrierState state = load(barrier);
  if (state.pending == 0)
    fault("an arrival at " + name_of(barrier) + " beyond the " + std::to_string(state.expected) +
          " of its phase");
  state.bytes += expected_bytes;
  --state.pending;
  store(barrier, state);
}

// To this block.
void begin_load(uint32_t address, const EncodedMap& map, void* barrier, const int64_t (&at)[3]) {
  if (load(barrier).shown == 0)
    fault("a load that completes on " + name_of(barrier) +
          ", whose initialization no fence has shown to the copy engine");
  std::memset(shared_bytes_at(address, map.box_bytes()), kPoison, map.box_bytes());
  defer([=, x = at[0], y = at[1], z = at[2]] {
    copy_box(map, {x, y, z}, address);
    BarrierState state = load(barrier);
    state.bytes -= map.box_bytes();
    store(barrier, state);
  });
}

}  // namespace

uint32_t address_of(const void* shared) {
  const auto* base = static_cast<const unsigned char*>(dynamic_shared_memory());
  return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - base);
}

unsigned char* shared_bytes_at(uint32_t address, uint32_t bytes) {
  if (uint64_t{address} + bytes > dynamic_shared_bytes()) {
    fault("an access of " + std::to_string(bytes) + " bytes at byte " + std::to_string(address) +
          " of " + std::to_string(dynamic_shared_bytes()) + " bytes of shared memory");
  }
  return static_cast<unsigned char*>(dynamic_shared_memory()) + address;
}

void init_barrier(void* barrier, int arrivals) {
  shared_bytes_at(address_of(barrier), sizeof(BarrierState));
  if (address_of(barrier) % 8 != 0) fault(name_of(barrier) + " is not at a multiple of 8");
  if (arrivals < 1 || arrivals > 1024)
    fault(name_of(barrier) + " for " + std::to_string(arrivals) + " arrivals");
  BarrierState state = {};
  state.mark = kMark;
  state.expected = state.pending = static_cast<unsigned>(arrivals) & 0x7ff;
  std::memcpy(barrier, &state, sizeof(state));
  not_shown().push_back(barrier);
}

void show_barriers() {
  for (void* barrier : not_shown()) {
    BarrierState state = load(barrier);
    state.shown = 1;
    std::memcpy(barrier, &state, sizeof(state));
  }
  not_shown().clear();
}

void arrive(void* barrier, int64_t expected_bytes) {
  perhaps_yield();
  arrive_now(barrier, expected_bytes);
}

void arrive_at(void* barrier, unsigned block) {
  perhaps_yield();
  const uint32_t address = address_of(barrier);
  in_block(block, [=] { arrive_now(shared_bytes_at(address, sizeof(BarrierState)), 0); });
}

void wait_phase(const void* barrier, uint32_t parity) {
  wait_until([=] { return load(barrier).phase != parity; },
             "parity " + std::to_string(parity) + " of " + name_of(barrier));
}

void check_map(const CUtensorMap* map) { encoded(map); }

void load_tile(void* to, const CUtensorMap* map, void* barrier, const int (&at)[3],
               unsigned blocks) {
  const EncodedMap copy = *encoded(map);
  const uint32_t address = address_of(to), of_barrier = address_of(barrier);
  const int64_t place[3] = {at[0], at[1], at[2]};
  if (address % kSwizzleSpan != 0)
    fault("a tile at byte " + std::to_string(address) +
          " of shared memory, the swizzle needs a multiple of 1024");
  for (unsigned b = 0; blocks >> b != 0; ++b) {
    if ((blocks >> b & 1) == 0) continue;
    in_block(b, [&] {
      begin_load(address, copy, shared_bytes_at(of_barrier, sizeof(BarrierState)), place);
    });
  }
  perhaps_yield();
}

}  // namespace qfx::emulated

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion /*promotion*/,
                                CUtensorMapFloatOOBfill /*fill*/) {
  using namespace qfx::emulated;
  if (type != CU_TENSOR_MAP_DATA_TYPE_UINT8 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      swizzle != CU_TENSOR_MAP_SWIZZLE_128B || rank != 3)
    return CUDA_ERROR_INVALID_VALUE;
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
    if (box[i] == 0 || box[i] > 256 || element_strides[i] != 1) return CUDA_ERROR_INVALID_VALUE;
  }
  if (box[0] % 16 != 0 || box[0] > 128) return CUDA_ERROR_INVALID_VALUE;
  if (box[0] != 128) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 2; ++i) {
    if (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
  }
  if (strides[0] < sizes[0] || strides[1] % strides[0] != 0) return CUDA_ERROR_INVALID_VALUE;
  EncodedMap encoded = {kEncoded, static_cast<const unsigned char*>(address), {}, {}, {}};
  std::memcpy(encoded.sizes, sizes, sizeof(encoded.sizes));
  std::memcpy(encoded.strides, strides, sizeof(encoded.strides));
  std::memcpy(encoded.box, box, sizeof(encoded.box));
  static_assert(sizeof(EncodedMap) <= sizeof(CUtensorMap));
  std::memcpy(map, &encoded, sizeof(encoded));
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                             unsigned /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool found = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = found ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
