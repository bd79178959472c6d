// The twin of csrc/cuda/core/device.cpp: the CPU is the GPU.
#include "cuda/core/device.h"

#include <torch/headeronly/util/Exception.h>

#include <cstring>

#include "fibers.h"

namespace qfx::cuda {

static Gpu emulated_gpu = {"the emulator", 80, 4};

void OnDevice::enter(const Tensor& first) { check(first, first); }

void OnDevice::check(const Tensor& first, const Tensor& other) const {
  STD_TORCH_CHECK(first.is_cpu() && other.is_cpu(), op_,
                  ": operands are on cpu and another; move all to one device");
}

void OnDevice::clear(void* memory, size_t bytes) const { std::memset(memory, 0, bytes); }

const Gpu& OnDevice::gpu() const { return emulated_gpu; }

}  // namespace qfx::cuda

// For ctypes.
extern "C" {
__attribute__((visibility("default"))) void qfx_emulated_seed(uint64_t seed) {
  qfx::emulated::set_seed(seed);
}
__attribute__((visibility("default"))) void qfx_emulated_capability(int capability) {
  qfx::cuda::emulated_gpu.capability = capability;
}
}
