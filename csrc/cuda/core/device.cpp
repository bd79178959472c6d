#include "cuda/core/device.h"

#include <cuda_runtime_api.h>
#include <torch/headeronly/util/Exception.h>

#include <map>
#include <mutex>
#include <string>

// Weak: a PyTorch without CUDA has none, and must load this library nevertheless.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace qfx::cuda {
namespace {

Gpu gpu_at(int32_t index) {
  cudaDeviceProp found = {};
  const cudaError_t error = cudaGetDeviceProperties(&found, index);
  STD_TORCH_CHECK(error == cudaSuccess,
                  "qfx: the GPU does not answer: ", cudaGetErrorString(error));
  return {found.name, 10 * found.major + found.minor, found.multiProcessorCount};
}

std::string place_of(const Tensor& t) {
  return t.is_cuda()  ? "cuda:" + std::to_string(t.get_device_index())
         : t.is_cpu() ? "cpu"
                      : "another";
}

}  // namespace

void OnDevice::enter(const Tensor& first) {
  check(first, first);
  index_ = first.get_device_index();
  guard_.emplace(index_);
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, op_,
                  ": this PyTorch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
  stream_ = static_cast<Stream>(stream);
}

void OnDevice::check(const Tensor& first, const Tensor& other) const {
  const bool together =
      first.is_cuda() && other.is_cuda() && first.get_device_index() == other.get_device_index();
  STD_TORCH_CHECK(together, op_, ": operands are on ", place_of(first), " and ", place_of(other),
                  "; move all to one device");
}

void OnDevice::clear(void* memory, size_t bytes) const {
  const cudaError_t error = cudaMemsetAsync(memory, 0, bytes, stream_);
  STD_TORCH_CHECK(error == cudaSuccess, op_, ": ", bytes,
                  " bytes of the GPU were not cleared: ", cudaGetErrorString(error));
}

const Gpu& OnDevice::gpu() const {
  static std::mutex mutex;
  static std::map<int32_t, Gpu> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(index_);
  return found != known.end() ? found->second : known.emplace(index_, gpu_at(index_)).first->second;
}

}  // namespace qfx::cuda
