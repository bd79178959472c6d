// The calls of libqfx that are no operators. They serve the Python module qfx._C, and change with
// any version. They are plain C: the two libraries may come from different compilers, each with a
// C++ library of its own, between which neither exceptions nor C++ objects can pass.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// What a call returns. Of a call that failed, qfx_api_error says why.
enum QfxStatus : int {
  kQfxDone,
  kQfxWrongValue,  // an argument has a value out of bounds
  kQfxWrongIndex,  // data names an element that there is not
  kQfxWrongType,   // an argument has another type than it must have
  kQfxNoMemory,    // memory could not be allocated
  kQfxFailed,      // anything else
  kQfxStopped,     // the caller's `poll` ended the call
};

// The sentence of this thread's last failure; it stays until the next one.
const char* qfx_api_error();

// Receives one row of a result: texts, of which a null pointer is the end, and `count` numbers.
// Both belong to the callee.
using QfxTake = void (*)(void* to, const char* const* texts, const int64_t* numbers, int64_t count);

// --- processor and kernels ---

QfxStatus qfx_api_isa(const char** name);        // the instruction set in use
QfxStatus qfx_api_isas(QfxTake take, void* to);  // name; best first
QfxStatus qfx_api_set_isa(const char* name);
QfxStatus qfx_api_faults(QfxTake take, void* to);  // sentences about kernels that failed their test
QfxStatus qfx_api_kernels(QfxTake take, void* to);  // name, isa; mr, nr, supported
QfxStatus qfx_api_kernel_for(int64_t rows, int64_t bits, int64_t w_bits, QfxTake take, void* to);
QfxStatus qfx_api_multiply(int64_t rounds, int64_t bits, int64_t w_bits, int64_t* products);
QfxStatus qfx_api_activations(QfxTake take, void* to);         // name
QfxStatus qfx_api_cuda_architectures(QfxTake take, void* to);  // name
QfxStatus qfx_api_cuda_packed_size(const int64_t* layout, int64_t count, int64_t k, int64_t* bytes);
void qfx_api_read_packed_again();
QfxStatus qfx_api_guard_counts(QfxTake take, void* to);  // site; four counts
QfxStatus qfx_api_take_guard_counts(const char* site, int64_t counts[4]);

// --- shares of threads ---

QfxStatus qfx_api_share_of_cores(double seconds, double* share);
// One row: threads + 1 numbers.
QfxStatus qfx_api_attention_shares(int64_t heads, int64_t rows, int64_t keys, bool causal,
                                   int64_t threads, QfxTake take, void* to);
QfxStatus qfx_api_whole_products(int64_t batch, int64_t work, int64_t threads, int64_t* products);
// sizes: products, rows, panels, tallest tile, rows of a block. A row for each task: share,
// product, first row, end, first panel, end; and one number, how many shares there are.
QfxStatus qfx_api_product_shares(const int64_t sizes[5], int64_t threads, QfxTake take, void* to);
// sizes: rows, panels, tallest tile, rows of a block, k.
QfxStatus qfx_api_k_parts(const int64_t sizes[5], int64_t threads, int64_t* parts);

// --- operators by addresses ---

// qfx::linears, and qfx::linear_dynamic as one of them. Addresses and numbers in the order that
// linears.cpp says. `y`: where the outputs lie, one after the other.
QfxStatus qfx_api_linears(const void* const* tensors, int64_t tensor_count, const int64_t* numbers,
                          int64_t count, void* y);
// qfx::conv_dynamic and qfx::conv_depthwise: convolutions.cpp.
QfxStatus qfx_api_convolution(const void* const* tensors, int64_t tensor_count,
                              const int64_t* numbers, int64_t count, void* y);

// --- programs (cpu/program/program.h) ---

struct QfxProgram;

// An address is 0 where it is given at each run.
QfxStatus qfx_api_make_program(const int64_t* words, int64_t word_count, const int64_t* bytes,
                               const int64_t* addresses, int64_t slots, QfxProgram** made);
void qfx_api_free_program(QfxProgram* program);
// places: null for all addresses that were not given. poll: called now and then; the run ends where
// it returns anything but 0.
QfxStatus qfx_api_run_program(QfxProgram* program, const int64_t* places, int64_t place_count,
                              const int64_t* given, int64_t count, int (*poll)());
// hint: empty for what is set for the formats.
QfxStatus qfx_api_stream_program(QfxProgram* program, const char* hint, int64_t ahead,
                                 int64_t streams);
double qfx_api_program_work(const QfxProgram* program);
QfxStatus qfx_api_program_written(const QfxProgram* program, QfxTake take, void* to);  // one row
// A row for each linear: address, bytes, rows.
QfxStatus qfx_api_program_weights(const QfxProgram* program, QfxTake take, void* to);

// --- parameters of formats (cpu/gemm/tuning.h) ---

struct QfxParameter {
  const char *format, *name, *text;  // name: null where a format has none; text: the value
  bool is_integer;
  int64_t integer;
};

QfxStatus qfx_api_tuning_fields(QfxTake take, void* to);  // the names of the numbers, in order
// A row for each format: its name and its hint's; the numbers.
QfxStatus qfx_api_tuning(const char* isa, bool defaults, QfxTake take, void* to);
QfxStatus qfx_api_set_tuning(const char* isa, const QfxParameter* parameters, int64_t count,
                             bool check_only);
// A row for each format: its name, and that of the format below or ""; few_rows, pair_rows.
QfxStatus qfx_api_choices(const char* isa, QfxTake take, void* to);

struct QfxTimedProduct;

QfxStatus qfx_api_make_timed_product(int64_t most_rows, int64_t k, int64_t n, int64_t weights,
                                     QfxTimedProduct** made);
void qfx_api_free_timed_product(QfxTimedProduct* product);
QfxStatus qfx_api_time_product(QfxTimedProduct* product, const char* isa, const char* format,
                               const QfxParameter* parameters, int64_t count, int64_t rows,
                               int64_t calls, double* seconds);
}
#pragma GCC visibility pop
