# The Hopper kernels, against exact sums, and the same with kernels that are broken on purpose: for each
# name in QFX_BROKEN, "name=kernel", the headers broken/<name>/cuda/sm90/*.cuh of the build folder are
# found before csrc/cuda's.
set(QFX_BROKEN "" CACHE STRING "broken kernels, name=kernel")
set_source_files_properties(${QFX_CUDA_HOPPER_KERNELS} PROPERTIES LANGUAGE CXX)
# A library, so that a broken kernel takes the place of the one it is made from.
add_library(sm90 STATIC copy_engine.cpp wgmma.cpp ${QFX_CUDA_CHOICE} ${QFX_CUDA_HOPPER_KERNELS})
add_library(sm90_main OBJECT sm90_tests.cpp)
add_executable(sm90_tests $<TARGET_OBJECTS:sm90_main>)
add_executable(choice_tests choice_tests.cpp)
set(PROGRAMS sm90_tests choice_tests)
foreach(broken ${QFX_BROKEN})
  string(REGEX MATCH "^(.+)=(.+)$" matched ${broken})
  set(program broken_${CMAKE_MATCH_1})
  add_executable(${program} ${QFX_CUDA_HOPPER_FOLDER}/${CMAKE_MATCH_2}.cu
                 $<TARGET_OBJECTS:sm90_main>)
  target_include_directories(${program} PRIVATE ${CMAKE_BINARY_DIR}/broken/${CMAKE_MATCH_1})
  target_compile_options(${program} PRIVATE -O0)  # quick to compile, soon over
  list(APPEND PROGRAMS ${program})
endforeach()
foreach(program ${PROGRAMS})
  target_link_libraries(${program} PRIVATE sm90 $<TARGET_OBJECTS:emulator>)
endforeach()
set(SM90_TARGETS sm90 sm90_main ${PROGRAMS})
foreach(target ${SM90_TARGETS})
  # -Wno-psabi: that tensor maps are passed otherwise since GCC 4.6 concerns nobody.
  target_compile_options(${target} PRIVATE -Wno-psabi)
  target_include_directories(${target} SYSTEM PRIVATE ${QFX_TORCH}/include)
endforeach()
add_custom_target(sm90_programs DEPENDS ${SM90_TARGETS})
