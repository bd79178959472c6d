// How libqfx shares work out among threads, for tests and for the cost model.
#include "cpu/attention/shares.h"

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>
#include <string>

#include "api/answer.h"
#include "api/api.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/k_parts.h"
#include "cpu/gemm/timing.h"

namespace qfx {
namespace {

void check_positive(const char* call, std::span<const int64_t> sizes, int64_t threads) {
  if (std::min(*std::min_element(sizes.begin(), sizes.end()), threads) < 1) {
    throw std::invalid_argument(std::string(call) + ": each number is 1 or more");
  }
}

void add_product_shares(std::span<const int64_t> sizes, int64_t threads, const Rows& rows) {
  check_positive("product_shares", sizes, threads);
  const cpu::Grid grid = cpu::grid_of({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]}, threads);
  for (int64_t i = 0; i < grid.shares(); ++i) {
    grid.for_each_task(i, [&](const cpu::Task& t) {
      rows.add(std::array<int64_t, 6>{i, t.product, t.block.begin, t.block.end, t.panel_begin,
                                      t.panel_end});
    });
  }
  rows.add(std::array<int64_t, 1>{grid.shares()});
}

int64_t k_parts(std::span<const int64_t> sizes, int64_t threads) {
  check_positive("k_parts", sizes, threads);
  return cpu::k_parts_of({1, sizes[0], sizes[1], sizes[2], sizes[3]}, sizes[4], threads);
}

}  // namespace
}  // namespace qfx

using namespace qfx;

QfxStatus qfx_api_share_of_cores(double seconds, double* share) {
  return answer([&] { *share = cpu::share_of_cores(seconds); });
}

QfxStatus qfx_api_attention_shares(int64_t heads, int64_t rows, int64_t keys, bool causal,
                                   int64_t threads, QfxTake take, void* to) {
  return answer([&] { Rows(take, to).add(cpu::shares({heads, rows, keys, causal}, threads)); });
}

QfxStatus qfx_api_whole_products(int64_t batch, int64_t work, int64_t threads, int64_t* products) {
  return answer([&] { *products = cpu::whole_products(batch, work, threads); });
}

QfxStatus qfx_api_product_shares(const int64_t sizes[5], int64_t threads, QfxTake take, void* to) {
  return answer([&] { add_product_shares({sizes, 5}, threads, Rows(take, to)); });
}

QfxStatus qfx_api_k_parts(const int64_t sizes[5], int64_t threads, int64_t* parts) {
  return answer([&] { *parts = k_parts({sizes, 5}, threads); });
}
