// qfx._C: how work is shared out among threads.
#include "python/convert.h"
#include "python/parts.h"

namespace qfx::python {
namespace {

Object share_of_cores(PyObject*, PyObject* args, PyObject* named) {
  double seconds = 0, share = 0;
  read_arguments(args, named, "d:share_of_cores", {"seconds"}, &seconds);
  check(qfx_api_share_of_cores(seconds, &share));
  return object_of(share);
}

Object attention_shares(PyObject*, PyObject* args, PyObject* named) {
  int64_t heads = 0, rows = 0, keys = 0, threads = 0;
  int causal = 0;
  read_arguments(args, named, "LLLpL:attention_shares",
                 {"heads", "rows", "keys", "causal", "threads"}, &heads, &rows, &keys, &causal,
                 &threads);
  const auto found = rows_of([&](QfxTake take, void* to) {
    return qfx_api_attention_shares(heads, rows, keys, causal != 0, threads, take, to);
  });
  return list_of(found.at(0).numbers);
}

Object whole_products(PyObject*, PyObject* args, PyObject* named) {
  int64_t batch = 0, work = 0, threads = 0, products = 0;
  read_arguments(args, named, "LLL:whole_products", {"batch", "work", "threads"}, &batch, &work,
                 &threads);
  check(qfx_api_whole_products(batch, work, threads, &products));
  return object_of(products);
}

// A row without its first number, which is its share.
Object task_of(const ResultRow& row) {
  return tuple_of({row.numbers.begin() + 1, row.numbers.end()});
}

Object product_shares(PyObject*, PyObject* args, PyObject* named) {
  int64_t sizes[5] = {}, threads = 0;
  read_arguments(args, named, "LLLLLL:product_shares",
                 {"products", "rows", "panels", "tallest", "block_rows", "threads"}, sizes,
                 sizes + 1, sizes + 2, sizes + 3, sizes + 4, &threads);
  auto rows = rows_of(
      [&](QfxTake take, void* to) { return qfx_api_product_shares(sizes, threads, take, to); });
  std::vector<std::vector<Object>> shares(static_cast<size_t>(rows.back().numbers.at(0)));
  rows.pop_back();
  for (const ResultRow& row : rows) {
    shares.at(static_cast<size_t>(row.numbers.at(0))).push_back(task_of(row));
  }
  std::vector<Object> lists;
  for (auto& share : shares) lists.push_back(list_of(std::move(share)));
  return list_of(std::move(lists));
}

Object k_parts(PyObject*, PyObject* args, PyObject* named) {
  int64_t sizes[5] = {}, threads = 0, parts = 0;
  read_arguments(args, named, "LLLLLL:k_parts",
                 {"rows", "panels", "tallest", "block_rows", "k", "threads"}, sizes, sizes + 1,
                 sizes + 2, sizes + 3, sizes + 4, &threads);
  check(qfx_api_k_parts(sizes, threads, &parts));
  return object_of(parts);
}

PyMethodDef methods[] = {
    method<share_of_cores>("share_of_cores",
                           "share_of_cores(seconds)\n--\n\nThe part of its core that each of "
                           "torch's threads gets if all "
                           "work for so long; 1 where nothing else runs."),
    method<attention_shares>("attention_shares",
                             "attention_shares(heads, rows, keys, causal, threads)\n--\n\nWhere "
                             "each thread's rows of an "
                             "int8 attention begin, counted through all heads, and end."),
    method<whole_products>(
        "whole_products",
        "whole_products(batch, work, threads)\n--\n\nHow many of a batch of products, of so many "
        "steps "
        "each, run whole on a thread; all threads share the rest."),
    method<product_shares>(
        "product_shares",
        "product_shares(products, rows, panels, tallest, block_rows, threads)\n--\n\nThe tasks of "
        "each "
        "thread of so many products of rows and panels of 32 columns, in tiles of at most "
        "`tallest` "
        "rows: product, first row, end, first panel, end."),
    method<k_parts>(
        "k_parts",
        "k_parts(rows, panels, tallest, block_rows, k, threads)\n--\n\nIn how many parts K is cut "
        "where "
        "one product has fewer panels than keep all threads at work; 1 where it is not."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_shares(PyObject* module) { add_functions(module, methods); }

}  // namespace qfx::python
