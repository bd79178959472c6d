# The CUDA operators and kernels, for CMakeLists.txt here and in tests/cuda.

# Plain C++.
set(QFX_CUDA_OPERATORS
  arguments.cpp
  ops_dequantize.cpp
  ops_quantize.cpp
  ops_weight.cpp)
# Kernels for all architectures.
set(QFX_CUDA_KERNELS
  dequantize.cu
  fake_quantize.cu
  pack.cu
  quantize.cu
  rotate.cu
  stochastic.cu)
# Kernels for Hopper alone (TMA, wgmma).
set(QFX_CUDA_HOPPER_KERNELS)

list(TRANSFORM QFX_CUDA_OPERATORS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_HOPPER_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
