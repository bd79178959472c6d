# Those of PyTorch that libqfx is linked with. Where this compiles for another processor than its
# own, PyTorch's are not here, and libraries of their names stand in: they say what is loaded.
set(QFX_TORCH_LIBRARIES "")
foreach(name torch torch_cpu c10)
  if(CMAKE_CROSSCOMPILING)
    add_library(stands_in_for_${name} SHARED ${CMAKE_CURRENT_LIST_DIR}/torch_stand_in.cpp)
    set_target_properties(stands_in_for_${name} PROPERTIES OUTPUT_NAME ${name}
                          LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/stand_ins)
    list(APPEND QFX_TORCH_LIBRARIES stands_in_for_${name})
  else()
    list(APPEND QFX_TORCH_LIBRARIES ${TORCH_DIR}/lib/lib${name}.so)
  endif()
endforeach()
