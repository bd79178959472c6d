# The CUDA operators and kernels, for CMakeLists.txt here and in tests/cuda.

# Plain C++.
set(QFX_CUDA_OPERATORS
  ops/arguments.cpp
  ops/binary.cpp
  ops/bmm.cpp
  ops/dequantize.cpp
  ops/groups.cpp
  ops/linear.cpp
  ops/linear_float.cpp
  ops/float_linear.cpp
  ops/lowbit_linear.cpp
  ops/product.cpp
  ops/quantize.cpp
  ops/requantize.cpp
  ops/weight.cpp)
# Kernels for all architectures.
set(QFX_CUDA_KERNELS
  gemm/binary.cu
  gemm/gemm.cu
  gemm/groups.cu
  gemm/copy_rows.cu
  gemm/pack.cu
  gemv/gemv.cu
  gemv/lowbit.cu
  gemv/lowbit_values.cu
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
# Kernels for Hopper alone (TMA, wgmma): a file of the build folder for each row of sm90/kernels.inc.
set(QFX_CUDA_HOPPER_FOLDER ${CMAKE_BINARY_DIR}/sm90)
set(QFX_CUDA_HOPPER_KERNELS "")
set(QFX_KIND_OF_S8 Code)
set(QFX_KIND_OF_B1 Sign)
set(table ${CMAKE_CURRENT_LIST_DIR}/sm90/kernels.inc)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table})
file(STRINGS ${table} rows REGEX "^QFX_")
foreach(row ${rows})
  if(NOT row MATCHES "^QFX_(S8|B1)\\((s8|b1)_([a-z0-9]+),")
    message(FATAL_ERROR "${table}: a row begins with QFX_S8(s8_<name>, or QFX_B1(b1_<name>, not with ${row}")
  endif()
  set(QFX_NAME ${CMAKE_MATCH_2}_${CMAKE_MATCH_3})
  set(QFX_KIND ${QFX_KIND_OF_${CMAKE_MATCH_1}})
  configure_file(${CMAKE_CURRENT_LIST_DIR}/sm90/kernel.cu.in ${QFX_CUDA_HOPPER_FOLDER}/${QFX_NAME}.cu
                 @ONLY)
  list(APPEND QFX_CUDA_HOPPER_KERNELS ${QFX_CUDA_HOPPER_FOLDER}/${QFX_NAME}.cu)
endforeach()

list(TRANSFORM QFX_CUDA_OPERATORS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_CHOICE PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CUDA_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
