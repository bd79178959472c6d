// What libqfx says of this processor and its kernels.
#include <algorithm>
#include <array>
#include <sstream>
#include <string>

#include "api/answer.h"
#include "api/api.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/integrity.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/selfcheck.h"
#include "cpu/ops/guard_counts.h"
#include "cuda/gemm/layout.h"
#include "operands.h"

namespace qfx {
namespace {

using cpu::Format;
using cpu::Isa;
using cpu::Kernels;
using cpu::Operands;

const Format& format_for(int64_t rows, int64_t bits, int64_t w_bits) {
  const bool narrow = bits < 8, narrow_weight = w_bits < 8;
  const Operands operands = narrow ? narrow_weight ? Operands::kNarrow : Operands::kNarrowCodes
                            : narrow_weight ? Operands::kNarrowWeight
                                            : Operands::kWide;
  return cpu::format_for(cpu::kernels_of(cpu::current_isa()), operands, rows);
}

std::string kernel_for(int64_t rows, int64_t bits, int64_t w_bits) {
  const Kernels& kernels = cpu::kernels_of(cpu::current_isa());
  const Format& format = format_for(rows, bits, w_bits);
  const int64_t height = cpu::tile_rows_for(format, rows);
  return cpu::kernel_name(kernels, format, static_cast<int>(height));
}

int64_t multiply(int64_t rounds, int64_t bits, int64_t w_bits) {
  constexpr int64_t kMany = int64_t{1} << 40;
  const auto run = format_for(kMany, bits, w_bits).multiply;
  return run == nullptr ? 0 : run(rounds);
}

// A row for each micro-kernel: mr rows of activations x nr columns of weights.
void add_kernels(const Rows& rows) {
  for (Isa isa : cpu::compiled_isas()) {
    const Kernels& k = cpu::kernels_of(isa);
    for (const Format* format : cpu::formats_of(k)) {
      for (int mr = 1; mr <= format->tile_rows; ++mr) {
        const std::array<int64_t, 3> numbers = {mr, cpu::kPanel, cpu::supported(isa)};
        rows.add(cpu::kernel_name(k, *format, mr).c_str(), k.isa, numbers);
      }
    }
  }
}

// As nvcc names them, without the dot: 75, ..., 90a.
void add_cuda_architectures(const Rows& rows) {
#if defined(QFX_CUDA_ARCHITECTURES)
  std::istringstream words(QFX_CUDA_ARCHITECTURES);
#else
  std::istringstream words;
#endif
  for (std::string name; words >> name;) rows.add(name.c_str());
}

int64_t cuda_packed_size(std::span<const int64_t> layout, int64_t k) {
  const auto known = layout_argument_of("cuda_packed_size", layout);
  return cuda::WeightLayout::of(known.n, k, known.group, known.scale_group, known.shift != 0)
      .bytes();
}

std::array<int64_t, 4> numbers_of(const cpu::GuardCounts& counts) {
  return {counts.calls, counts.rows, counts.float_calls, counts.float_rows};
}

thread_local std::string last_error;

}  // namespace

QfxStatus failed(QfxStatus status, const char* why) noexcept {
  try {
    last_error = why;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

}  // namespace qfx

using namespace qfx;

const char* qfx_api_error() { return last_error.c_str(); }

QfxStatus qfx_api_isa(const char** name) {
  return answer([&] { *name = cpu::name_of(cpu::current_isa()); });
}

QfxStatus qfx_api_isas(QfxTake take, void* to) {
  return answer([&] {
    for (Isa isa : cpu::usable_isas()) Rows(take, to).add(cpu::name_of(isa));
  });
}

QfxStatus qfx_api_set_isa(const char* name) {
  return answer([&] { cpu::set_isa(name); });
}

QfxStatus qfx_api_faults(QfxTake take, void* to) {
  return answer([&] {
    for (const std::string& fault : cpu::faults()) Rows(take, to).add(fault.c_str());
  });
}

QfxStatus qfx_api_kernels(QfxTake take, void* to) {
  return answer([&] { add_kernels(Rows(take, to)); });
}

QfxStatus qfx_api_kernel_for(int64_t rows, int64_t bits, int64_t w_bits, QfxTake take, void* to) {
  return answer([&] { Rows(take, to).add(kernel_for(rows, bits, w_bits).c_str()); });
}

QfxStatus qfx_api_multiply(int64_t rounds, int64_t bits, int64_t w_bits, int64_t* products) {
  return answer([&] { *products = multiply(rounds, bits, w_bits); });
}

QfxStatus qfx_api_activations(QfxTake take, void* to) {
  return answer([&] {
    for (const char* name : kActivationNames) Rows(take, to).add(name);
  });
}

QfxStatus qfx_api_cuda_architectures(QfxTake take, void* to) {
  return answer([&] { add_cuda_architectures(Rows(take, to)); });
}

QfxStatus qfx_api_cuda_packed_size(const int64_t* layout, int64_t count, int64_t k,
                                   int64_t* bytes) {
  return answer([&] { *bytes = cuda_packed_size({layout, static_cast<size_t>(count)}, k); });
}

void qfx_api_read_packed_again() { cpu::forget_whole(); }

QfxStatus qfx_api_guard_counts(QfxTake take, void* to) {
  return answer([&] {
    for (const auto& [site, counts] : cpu::guard_counts()) {
      Rows(take, to).add(site.c_str(), numbers_of(counts));
    }
  });
}

QfxStatus qfx_api_take_guard_counts(const char* site, int64_t counts[4]) {
  return answer([&] {
    const auto found = numbers_of(cpu::take_guard_counts(site));
    std::copy(found.begin(), found.end(), counts);
  });
}
