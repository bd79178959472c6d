#include "cuda/device.h"

#include <cuda_runtime_api.h>
#include <torch/headeronly/util/Exception.h>

#include <string>

// Weak: a PyTorch without CUDA has none, and must load this library nevertheless.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace qfx::cuda {
namespace {

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, which, device);
  STD_TORCH_CHECK(error == cudaSuccess,
                  "qfx: the GPU does not answer: ", cudaGetErrorString(error));
  return value;
}

std::string place_of(const Tensor& t) {
  return t.is_cuda()  ? "cuda:" + std::to_string(t.get_device_index())
         : t.is_cpu() ? "cpu"
                      : "another";
}

}  // namespace

void OnDevice::enter(const Tensor& first) {
  check(first, first);
  const int32_t index = first.get_device_index();
  guard_.emplace(index);
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, op_,
                  ": this PyTorch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  stream_ = static_cast<Stream>(stream);
}

void OnDevice::check(const Tensor& first, const Tensor& other) const {
  const bool together =
      first.is_cuda() && other.is_cuda() && first.get_device_index() == other.get_device_index();
  STD_TORCH_CHECK(together, op_, ": operands are on ", place_of(first), " and ", place_of(other),
                  "; move all to one device");
}

int OnDevice::capability() const {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
         attribute(cudaDevAttrComputeCapabilityMinor);
}

int OnDevice::multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }

}  // namespace qfx::cuda
