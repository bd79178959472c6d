# The CPU core: what computes, which needs nothing of torch but its threads (cpu/threads.h). The
# extension and the native tests (tests/native) both read this list, so that they agree on the flags.
set(QFX_CORE
  attention.cpp
  attention_decode.cpp
  attention_keys.cpp
  attention_rows.cpp
  binary.cpp
  binary_pack.cpp
  binary_ref.cpp
  checksum.cpp
  dispatch.cpp
  gemm.cpp
  group_product.cpp
  isa.cpp
  mask.cpp
  pack.cpp
  pack_floats.cpp
  processor.cpp
  product.cpp
  quantize.cpp
  selfcheck.cpp
  shares.cpp
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
include(CheckCXXCompilerFlag)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(QUIET -Wno-uninitialized -Wno-maybe-uninitialized)  # GCC bug 105593: its own AVX-512 header
  qfx_isa(ukernel_avx2.cpp -mavx2 -mfma -mf16c)
  qfx_isa(ukernel_avxvnni.cpp -mavx2 -mavxvnni)
  check_cxx_compiler_flag(-mavxvnniint8 QFX_AVXVNNIINT8)  # GCC 13, Clang 16
  if(QFX_AVXVNNIINT8)
    list(APPEND QFX_CORE_OPTIONS -DQFX_AVXVNNIINT8)
    qfx_isa(ukernel_avxvnniint8.cpp -mavx2 -mavxvnniint8)
  endif()
  qfx_isa(ukernel_avx512vnni.cpp -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq
          -mavx512vnni -mprefer-vector-width=512 ${QUIET})
  qfx_isa(ukernel_amx.cpp -mamx-tile -mamx-int8)
  qfx_isa(binary_avx2.cpp -mavx2)
  qfx_isa(binary_avx512.cpp -mavx512f -mavx512vpopcntdq ${QUIET})
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    set(KEEP -fno-schedule-insns)  # before registers are allocated, or sums do not fit into them
    set(WITH -march=armv8.2-a)
  else()
    set(WITH -mcpu=generic)  # zig knows no -march
  endif()
  qfx_isa(ukernel_neon.cpp ${KEEP})
  qfx_isa(ukernel_neondot.cpp ${WITH}+dotprod ${KEEP})
  qfx_isa(ukernel_neoni8mm.cpp ${WITH}+dotprod+i8mm ${KEEP})
endif()
list(TRANSFORM QFX_CORE PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
