# The CPU core: what computes, which needs nothing of torch but its threads (cpu/threads.h). The
# extension and the native tests (tests/native) both read this list, so that they agree on the flags.
set(QFX_CORE
  attention.cpp
  binary.cpp
  binary_pack.cpp
  binary_ref.cpp
  dispatch.cpp
  gemm.cpp
  isa.cpp
  pack.cpp
  pack_floats.cpp
  processor.cpp
  product.cpp
  quantize.cpp
  selfcheck.cpp
  ukernel_ref.cpp)
# Every form of an op must give the same bits, so the compiler may not contract a*b+c on its own.
# Nothing reads floating-point traps or errno; saying so lets it vectorize the activations.
set(QFX_CORE_OPTIONS -ffp-contract=off -fno-trapping-math -fno-math-errno)

# qfx_isa(<file> <flags>): the only files that use wide instructions, chosen at run time.
macro(qfx_isa file)
  list(APPEND QFX_CORE ${file})
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/${file} PROPERTIES COMPILE_OPTIONS
                              "-O3;${ARGN}")
endmacro()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(QUIET -Wno-uninitialized -Wno-maybe-uninitialized)  # GCC bug 105593: its own AVX-512 header
  qfx_isa(ukernel_avx2.cpp -mavx2 -mfma -mf16c)
  qfx_isa(ukernel_avxvnni.cpp -mavx2 -mavxvnni)
  qfx_isa(ukernel_avx512vnni.cpp -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq
          -mavx512vnni -mprefer-vector-width=512 ${QUIET})
  qfx_isa(ukernel_amx.cpp -mamx-tile -mamx-int8)
  qfx_isa(binary_avx2.cpp -mavx2)
  qfx_isa(binary_avx512.cpp -mavx512f -mavx512vpopcntdq ${QUIET})
endif()
list(TRANSFORM QFX_CORE PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
