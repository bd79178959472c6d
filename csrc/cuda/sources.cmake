# The CUDA operators and kernels, for CMakeLists.txt here and in tests/cuda.

# Plain C++.
set(QFX_CUDA_OPERATORS
  arguments.cpp
  ops_binary.cpp
  ops_bmm.cpp
  ops_dequantize.cpp
  ops_groups.cpp
  ops_linear.cpp
  ops_quantize.cpp
  ops_requantize.cpp
  ops_weight.cpp
  ops_weight_only.cpp
  product.cpp)
# Kernels for all architectures.
set(QFX_CUDA_KERNELS
  binary.cu
  dequantize.cu
  fake_quantize.cu
  gemm.cu
  gemv.cu
  groups.cu
  moves.cu
  pack.cu
  quantize.cu
  rotate.cu
  signs.cu
  stochastic.cu)
# Kernels for Hopper alone (TMA, wgmma).
set(QFX_CUDA_HOPPER_KERNELS)

list(TRANSFORM QFX_CUDA_OPERATORS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_HOPPER_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
