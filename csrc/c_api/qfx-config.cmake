# find_package(qfx): how C++ uses an installed qfx. It works wherever this folder lies.
#   qfx::programs   runs files of programs (qfx/programs.h); needs neither torch nor Python
#   qfx::operators  registers the operators with torch, for packages of AOTInductor; link torch too
get_filename_component(QFX_PREFIX ${CMAKE_CURRENT_LIST_DIR}/../../.. ABSOLUTE)

if(NOT TARGET qfx::programs)
  if(EXISTS ${QFX_PREFIX}/lib/libqfx_programs.so)
    add_library(qfx::programs SHARED IMPORTED)
    set_target_properties(qfx::programs PROPERTIES
      IMPORTED_LOCATION ${QFX_PREFIX}/lib/libqfx_programs.so IMPORTED_NO_SONAME OFF)
  elseif(EXISTS ${QFX_PREFIX}/lib/libqfx_programs.a)
    include(CMakeFindDependencyMacro)
    find_dependency(Threads)
    add_library(qfx::programs STATIC IMPORTED)
    set_target_properties(qfx::programs PROPERTIES
      IMPORTED_LOCATION ${QFX_PREFIX}/lib/libqfx_programs.a
      IMPORTED_LINK_INTERFACE_LANGUAGES CXX INTERFACE_LINK_LIBRARIES Threads::Threads)
  endif()
  if(TARGET qfx::programs)
    target_include_directories(qfx::programs INTERFACE ${QFX_PREFIX}/include)
    set(qfx_programs_FOUND TRUE)
  endif()
endif()

if(NOT TARGET qfx::operators AND EXISTS ${QFX_PREFIX}/lib/libqfx.so)
  # A program that calls none of its functions needs it too: loading it registers the operators.
  add_library(qfx::operators INTERFACE IMPORTED)
  target_link_libraries(qfx::operators INTERFACE
    -Wl,--push-state,--no-as-needed ${QFX_PREFIX}/lib/libqfx.so -Wl,--pop-state)
  set(qfx_operators_FOUND TRUE)
endif()

foreach(component ${qfx_FIND_COMPONENTS})
  if(NOT TARGET qfx::${component} AND qfx_FIND_REQUIRED_${component})
    set(qfx_FOUND FALSE)
    set(qfx_NOT_FOUND_MESSAGE "${QFX_PREFIX} has no ${component}")
  endif()
endforeach()
