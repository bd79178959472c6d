# The CPU's sources, for CMakeLists.txt here and in tests/native, so that both agree on the flags.

# What computes, which needs nothing but threads (cpu/core/threads.h): a library links one kind.
set(QFX_CPU_SOURCES
  attention/attention.cpp
  attention/backward.cpp
  attention/cache.cpp
  attention/cache_attend.cpp
  attention/cache_codes.cpp
  attention/cache_masks.cpp
  attention/cache_products.cpp
  attention/cache_rows.cpp
  attention/decode.cpp
  attention/float_tiles.cpp
  attention/head_gradient.cpp
  attention/head_gradient_rows.cpp
  attention/keys.cpp
  attention/mask.cpp
  attention/rows.cpp
  attention/shares.cpp
  attention/transposed_codes.cpp
  binary/gemm.cpp
  binary/pack.cpp
  binary/ref.cpp
  conv/convolution.cpp
  conv/depthwise.cpp
  conv/im2col.cpp
  conv/lines.cpp
  conv/window_rows.cpp
  core/checksum.cpp
  core/flush.cpp
  core/isa.cpp
  core/processor.cpp
  core/thrown.cpp
  core/vendor.cpp
  gemm/float_product.cpp
  gemm/gemm.cpp
  gemm/grid.cpp
  gemm/group_panel.cpp
  gemm/group_product.cpp
  gemm/group_rows.cpp
  gemm/k_parts.cpp
  gemm/experts.cpp
  gemm/gate.cpp
  gemm/linear.cpp
  gemm/linear_job.cpp
  gemm/lowbit.cpp
  gemm/lowbit_float_product.cpp
  gemm/lowbit_product.cpp
  gemm/meetings.cpp
  gemm/pack.cpp
  gemm/pack_floats.cpp
  gemm/passage.cpp
  gemm/product.cpp
  gemm/quantize.cpp
  gemm/strips.cpp
  gemm/tasks.cpp
  gemm/timing.cpp
  gemm/tuning.cpp
  gemm/weight.cpp
  gemm/whole_product.cpp
  gemm/integrity.cpp
  kernels/dispatch.cpp
  kernels/ref.cpp
  kernels/selfcheck.cpp
  kernels/selfcheck_floats.cpp
  kernels/selfcheck_groups.cpp
  kernels/selfcheck_lowbit.cpp
  kernels/selfcheck_strips.cpp
  rnn/recurrence.cpp
  program/attention.cpp
  program/caches.cpp
  program/experts.cpp
  program/float_linear.cpp
  program/floats.cpp
  program/linears.cpp
  program/norms.cpp
  program/routing.cpp
  program/data_movement.cpp
  program/operand.cpp
  program/program.cpp)
# What makes operators of it.
set(QFX_CPU_OPERATORS
  ops/arguments.cpp
  ops/attention.cpp
  ops/attention_operands.cpp
  ops/binary.cpp
  ops/bmm.cpp
  ops/dequantize.cpp
  ops/convolution.cpp
  ops/depthwise.cpp
  ops/experts.cpp
  ops/guard.cpp
  ops/guard_counts.cpp
  ops/kv_cache.cpp
  ops/kv_pages.cpp
  ops/kv_operands.cpp
  ops/linear.cpp
  ops/pack.cpp
  ops/quantize.cpp
  ops/recurrent.cpp
  ops/requantize.cpp
  ops/rotate.cpp
  ops/windows.cpp
  ops/alias_check.cpp)
# Every form of an op must give the same bits, so the compiler may not contract a*b+c on its own.
# Nothing reads floating-point traps or errno; saying so lets it vectorize the activations.
set(QFX_CPU_OPTIONS -ffp-contract=off -fno-trapping-math -fno-math-errno)

# qfx_isa(<file> <flags>): the only files that use wide instructions, chosen at run time.
if(NOT DEFINED QFX_KERNEL_OPTIMIZATION)
  set(QFX_KERNEL_OPTIMIZATION -O3)
endif()
macro(qfx_isa file)
  list(APPEND QFX_CPU_SOURCES ${file})
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/${file} PROPERTIES COMPILE_OPTIONS
                              "${QFX_KERNEL_OPTIMIZATION};${ARGN}")
endmacro()
include(CheckCXXCompilerFlag)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(QUIET -Wno-uninitialized -Wno-maybe-uninitialized)  # GCC bug 105593: its own AVX-512 header
  qfx_isa(kernels/x86/avx2.cpp -mavx2 -mfma -mf16c)
  qfx_isa(kernels/x86/avxvnni.cpp -mavx2 -mfma -mf16c -mavxvnni)
  check_cxx_compiler_flag(-mavxvnniint8 QFX_AVXVNNIINT8)  # GCC 13, Clang 16
  if(QFX_AVXVNNIINT8)
    list(APPEND QFX_CPU_OPTIONS -DQFX_AVXVNNIINT8)
    qfx_isa(kernels/x86/avxvnniint8.cpp -mavx2 -mfma -mf16c -mavxvnniint8)
  endif()
  qfx_isa(kernels/x86/avx512vnni.cpp -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl
          -mavx512dq -mavx512vnni -mprefer-vector-width=512 ${QUIET})
  qfx_isa(kernels/x86/amx.cpp -mamx-tile -mamx-int8 -mavx2 -mfma -mf16c -mavx512f -mavx512bw
          -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mprefer-vector-width=512 ${QUIET})
  qfx_isa(binary/avx2.cpp -mavx2)
  qfx_isa(binary/avx512.cpp -mavx512f -mavx512vpopcntdq ${QUIET})
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    set(KEEP -fno-schedule-insns)  # before registers are allocated, or sums do not fit into them
    set(WITH -march=armv8.2-a)
  else()
    set(WITH -mcpu=generic)  # zig knows no -march
  endif()
  qfx_isa(kernels/arm/neon.cpp ${KEEP})
  qfx_isa(kernels/arm/neondot.cpp ${WITH}+dotprod ${KEEP})
  qfx_isa(kernels/arm/neoni8mm.cpp ${WITH}+dotprod+i8mm ${KEEP})
endif()
list(TRANSFORM QFX_CPU_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM QFX_CPU_OPERATORS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)

# qfx_compiled(<variable> <folder> <sources>): their objects, which lie there as the sources lie here.
function(qfx_compiled variable folder)
  set(found "")
  foreach(source ${ARGN})
    file(RELATIVE_PATH name ${CMAKE_CURRENT_FUNCTION_LIST_DIR} ${source})
    list(APPEND found ${folder}/${name}.o)
  endforeach()
  set_source_files_properties(${found} PROPERTIES EXTERNAL_OBJECT ON)
  set(${variable} ${found} PARENT_SCOPE)
endfunction()
