# The Hopper kernels against exact sums, and the same with kernels that are broken on purpose: for each
# name in QFX_BROKEN, "name=kernel", the header broken/<name>/cuda/gemm_sm90.cuh of the build folder is
# found before csrc/cuda's.
set(QFX_BROKEN "" CACHE STRING "broken kernels, name=kernel")
set(CUDA ${QFX_ROOT}/csrc/cuda)
file(GLOB SM90_KERNELS CONFIGURE_DEPENDS ${CUDA}/sm90_*.cu)
set_source_files_properties(${SM90_KERNELS} ${CUDA}/multiply_sm90.cu PROPERTIES LANGUAGE CXX)

# A library, so that a broken kernel takes the place of the one it is made from.
add_library(sm90 STATIC copy_engine.cpp wgmma.cpp sm90_tests.cpp ${SM90_KERNELS}
  ${CUDA}/choice.cpp ${CUDA}/multiply_sm90.cu ${CUDA}/tensor_map.cpp $<TARGET_OBJECTS:emulator>)
add_executable(choice_tests choice_tests.cpp ${CUDA}/choice.cpp)
file(WRITE ${CMAKE_BINARY_DIR}/empty.cpp "")
add_executable(sm90_tests ${CMAKE_BINARY_DIR}/empty.cpp)
set(SM90_TARGETS sm90 sm90_tests choice_tests)
foreach(broken ${QFX_BROKEN})
  string(REGEX MATCH "^(.+)=(.+)$" matched ${broken})
  set(target broken_${CMAKE_MATCH_1})
  add_executable(${target} ${CUDA}/sm90_${CMAKE_MATCH_2}.cu)
  target_include_directories(${target} PRIVATE ${CMAKE_BINARY_DIR}/broken/${CMAKE_MATCH_1})
  set_target_properties(${target} PROPERTIES COMPILE_OPTIONS -O0)  # quick to compile, soon over
  list(APPEND SM90_TARGETS ${target})
endforeach()
foreach(target ${SM90_TARGETS})
  # -Wno-psabi: that tensor maps are passed otherwise since GCC 4.6 concerns nobody.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi
                         -ffp-contract=off -U_FORTIFY_SOURCE)
  target_include_directories(${target} PRIVATE emulated ${CMAKE_CURRENT_LIST_DIR} ${QFX_ROOT}/csrc)
  target_include_directories(${target} SYSTEM PRIVATE ${QFX_TORCH}/include)
  if(NOT target STREQUAL sm90)
    target_link_libraries(${target} PRIVATE sm90)
  endif()
endforeach()
add_custom_target(sm90_programs DEPENDS ${SM90_TARGETS})
