# The CUDA kernels of libqfx. QFX_CUDA: AUTO builds them where torch has CUDA and nvcc is
# found, ON builds them (nothing in it needs a torch with CUDA), OFF does not.
set(QFX_CUDA AUTO CACHE STRING "CUDA kernels: AUTO, ON or OFF")
# 8.6 and 8.9 run the code of 8.0; what is later than 9.0 compiles its PTX when it is loaded.
set(QFX_CUDA_ARCHITECTURES 75-real 80-real 90 CACHE STRING "of the kernels for every GPU")
set(QFX_CUDA_HOPPER_ARCHITECTURES 90a-real)
include(${CMAKE_CURRENT_LIST_DIR}/sources.cmake)

# torch's own statement, read rather than imported, which takes seconds.
file(STRINGS ${TORCH_DIR}/version.py TORCH_CUDA REGEX "^cuda.*= *'")
include(CheckLanguage)
if(QFX_CUDA STREQUAL "ON" OR (QFX_CUDA STREQUAL "AUTO" AND TORCH_CUDA))
  check_language(CUDA)
endif()
if(QFX_CUDA STREQUAL "OFF")
  set(WHY_NOT "QFX_CUDA=OFF")
elseif(QFX_CUDA STREQUAL "AUTO" AND NOT TORCH_CUDA)
  set(WHY_NOT "this torch has no CUDA; QFX_CUDA=ON builds them nevertheless")
elseif(NOT CMAKE_CUDA_COMPILER)
  set(WHY_NOT "no nvcc")
endif()
if(WHY_NOT AND QFX_CUDA STREQUAL "ON")
  message(FATAL_ERROR "QFX_CUDA=ON asks for CUDA kernels, and there is ${WHY_NOT}. Put nvcc on the PATH.")
elseif(WHY_NOT)
  message(STATUS "qfx: CPU kernels only: ${WHY_NOT}")
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES 90)  # of the compiler's own check
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_STANDARD 20)

# qfx_kernels(<target> <architectures> <sources>)
function(qfx_kernels target architectures)
  add_library(${target} OBJECT ${ARGN})
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES "${architectures}"
    CUDA_VISIBILITY_PRESET hidden
    POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${target} PRIVATE csrc)
  target_include_directories(${target} SYSTEM PRIVATE ${TORCH_DIR}/include)
  # -fmad=false: products and sums round as written; where they shall not, fmaf is.
  target_compile_options(${target} PRIVATE -fmad=false)
  target_link_libraries(qfx PRIVATE $<TARGET_OBJECTS:${target}>)
endfunction()

qfx_kernels(qfx_cuda "${QFX_CUDA_ARCHITECTURES}" ${QFX_CUDA_KERNELS})
if(QFX_CUDA_HOPPER_KERNELS)
  qfx_kernels(qfx_cuda_hopper "${QFX_CUDA_HOPPER_ARCHITECTURES}" ${QFX_CUDA_HOPPER_KERNELS})
endif()
target_sources(qfx PRIVATE ${QFX_CUDA_OPERATORS} ${QFX_CUDA_CHOICE} ${CMAKE_CURRENT_LIST_DIR}/core/device.cpp)
target_link_libraries(qfx PRIVATE CUDA::cudart_static)
set_target_properties(qfx PROPERTIES LINKER_LANGUAGE CXX)
set(BUILT ${QFX_CUDA_ARCHITECTURES} ${QFX_CUDA_HOPPER_ARCHITECTURES})
list(TRANSFORM BUILT REPLACE "-real" "")
list(JOIN BUILT " " BUILT)
message(STATUS "qfx: CUDA kernels for ${BUILT}")
set_property(SOURCE csrc/api/processor.cpp APPEND PROPERTY COMPILE_DEFINITIONS
             QFX_CUDA_ARCHITECTURES="${BUILT}")
