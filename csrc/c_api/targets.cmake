# The library of programs, qfx_programs, which needs the C++ library and threads alone, and what
# C++ users find with find_package(qfx). Includes nothing of torch or Python.
find_package(Threads REQUIRED)
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/../../pyproject.toml QFX_VERSION REGEX "^version = ")
string(REGEX REPLACE "^version = \"(.*)\"$" "\\1" QFX_VERSION ${QFX_VERSION})

# The objects of the CPU's part, without operators.
if(TARGET qfx_cpu)
  set(COMPUTING $<FILTER:$<TARGET_OBJECTS:qfx_cpu>,EXCLUDE,/cpu/ops/>)
elseif(QFX_CPU_OBJECTS)
  qfx_compiled(COMPUTING ${QFX_CPU_OBJECTS} ${QFX_CPU_SOURCES})
else()
  add_library(qfx_computing OBJECT ${QFX_CPU_SOURCES})
  set_target_properties(qfx_computing PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
  set(COMPUTING $<TARGET_OBJECTS:qfx_computing>)
endif()
set(C_API decoder decoder_file graph json limits model pages programs tensor_file threads)
list(TRANSFORM C_API PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM C_API APPEND .cpp)
# BUILD_SHARED_LIBS=OFF makes it static.
if(NOT DEFINED BUILD_SHARED_LIBS)
  set(KIND SHARED)
endif()
if(KIND OR BUILD_SHARED_LIBS)  # a static library takes what its program does
  list(APPEND C_API ${CMAKE_CURRENT_LIST_DIR}/../old_systems.cpp)
endif()
add_library(qfx_programs ${KIND} ${C_API} ${COMPUTING})
set_target_properties(qfx_programs PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                      VISIBILITY_INLINES_HIDDEN ON SKIP_BUILD_RPATH ON INSTALL_RPATH ""
                      LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/exports.map)
foreach(target qfx_programs qfx_computing)
  if(TARGET ${target})
    target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
    target_compile_options(${target} PRIVATE -Wall -Wextra ${QFX_CPU_OPTIONS})
  endif()
endforeach()
target_compile_definitions(qfx_programs PRIVATE QFX_VERSION="${QFX_VERSION}")
target_link_libraries(qfx_programs PRIVATE Threads::Threads)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # Conversions of halves that an older libgcc_s.so.1 does not have are taken from the archive.
  target_link_libraries(qfx_programs PRIVATE -l:libgcc.a)
endif()
# Its functions alone are seen, and its threads need its code as long as the process lives.
target_link_options(qfx_programs PRIVATE
                    LINKER:--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map LINKER:-z,nodelete)

include(CMakePackageConfigHelpers)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/qfx-config-version.cmake
  VERSION ${QFX_VERSION} COMPATIBILITY SameMinorVersion)
install(TARGETS qfx_programs DESTINATION qfx/lib)
install(DIRECTORY ${CMAKE_CURRENT_LIST_DIR}/../include/qfx DESTINATION qfx/include)
install(FILES ${CMAKE_CURRENT_LIST_DIR}/qfx-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/qfx-config-version.cmake DESTINATION qfx/lib/cmake/qfx)
