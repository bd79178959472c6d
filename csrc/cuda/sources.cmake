# The CUDA operators and kernels, for CMakeLists.txt here and in tests/cuda.

# Plain C++.
set(QFX_CUDA_OPERATORS
  ops/arguments.cpp
  ops/binary.cpp
  ops/bmm.cpp
  ops/dequantize.cpp
  ops/groups.cpp
  ops/linear.cpp
  ops/product.cpp
  ops/quantize.cpp
  ops/requantize.cpp
  ops/weight.cpp
  ops/weight_only.cpp)
# Kernels for all architectures.
set(QFX_CUDA_KERNELS
  gemm/binary.cu
  gemm/gemm.cu
  gemm/groups.cu
  gemm/moves.cu
  gemm/pack.cu
  gemv/gemv.cu
  rows/dequantize.cu
  rows/fake_quantize.cu
  rows/quantize.cu
  rows/rotate.cu
  rows/signs.cu
  rows/stochastic.cu)
# Which kernel runs, and what those for Hopper are given: plain C++ without torch's library.
set(QFX_CUDA_CHOICE
  sm90/choice.cpp
  sm90/multiply.cpp
  sm90/tensor_map.cpp)
# Kernels for Hopper alone (TMA, wgmma).
set(QFX_CUDA_HOPPER_KERNELS
  sm90/b1_128x128.cu
  sm90/b1_128x256.cu
  sm90/b1_128x256x2.cu
  sm90/b1_swap16.cu
  sm90/b1_swap64.cu
  sm90/s8_128x128.cu
  sm90/s8_128x256.cu
  sm90/s8_128x256x2.cu
  sm90/s8_swap128.cu
  sm90/s8_swap16.cu
  sm90/s8_swap32.cu
  sm90/s8_swap64.cu
  sm90/s8_swap8.cu)

list(TRANSFORM QFX_CUDA_OPERATORS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_CHOICE PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_HOPPER_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
