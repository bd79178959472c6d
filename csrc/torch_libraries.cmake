# Those of PyTorch that libqfx is linked with. Where this compiles for another processor than its
# own, PyTorch's are not here, so empty libraries of their names say what must be loaded.
set(QFX_TORCH_LIBRARIES "")
foreach(name torch torch_cpu c10)
  if(CMAKE_CROSSCOMPILING)
    set(empty ${CMAKE_CURRENT_BINARY_DIR}/empty.cpp)
    file(WRITE ${empty} "")
    add_library(qfx_named_${name} SHARED ${empty})
    set_target_properties(qfx_named_${name} PROPERTIES OUTPUT_NAME ${name}
                          LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/named)
    list(APPEND QFX_TORCH_LIBRARIES qfx_named_${name})
  else()
    list(APPEND QFX_TORCH_LIBRARIES ${TORCH_DIR}/lib/lib${name}.so)
  endif()
endforeach()
