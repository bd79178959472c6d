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
# Which kernel runs, and what those for Hopper are given: plain C++ without torch's library.
set(QFX_CUDA_CHOICE
  choice.cpp
  multiply_sm90.cpp
  tensor_map.cpp)
# Kernels for Hopper alone (TMA, wgmma).
set(QFX_CUDA_HOPPER_KERNELS
  sm90_b1_128x128.cu
  sm90_b1_128x256.cu
  sm90_b1_128x256x2.cu
  sm90_b1_swap16.cu
  sm90_b1_swap64.cu
  sm90_s8_128x128.cu
  sm90_s8_128x256.cu
  sm90_s8_128x256x2.cu
  sm90_s8_swap128.cu
  sm90_s8_swap16.cu
  sm90_s8_swap32.cu
  sm90_s8_swap64.cu
  sm90_s8_swap8.cu)

list(TRANSFORM QFX_CUDA_OPERATORS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_CHOICE PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_HOPPER_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
