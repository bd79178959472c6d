/* Runs files of programs that qfx wrote, without Python and PyTorch: language models with a cache
 * (qfx.generate.save_programs), and graphs of fixed shapes such as encoders
 * (qfx.generate.save_program). C99.
 *
 * Errors. Functions that return int return QFX_OK, or another qfx_status, and then qfx_error() says
 * in a sentence what is wrong. After an error nothing has changed, unless stated otherwise.
 *
 * Threads. Different programs may be used by different threads at the same time. Calls for one
 * program run one after the other. A call uses up to qfx_set_threads() threads; of calls at the
 * same time one has all of them, and the others compute on their own thread. The number of threads
 * changes no bit of a result.
 *
 * Memory. Arrays are contiguous, the last axis varies fastest, and begin at an address that is a
 * multiple of the size of their elements. A program keeps no pointer to them.
 *
 * Files. They may come from anywhere: they contain no code, and their memory, instructions and work
 * are checked when they are read. */
#ifndef QFX_PROGRAMS_H
#define QFX_PROGRAMS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define QFX_API __attribute__((visibility("default")))
#else
#define QFX_API
#endif

typedef enum {
  QFX_OK = 0,
  QFX_ARGUMENT = 1, /* an argument is wrong: a null pointer, a count, a token id */
  QFX_FILE = 2,     /* the file cannot be read */
  QFX_REFUSED = 3,  /* the file can be read, and is no file of programs that this version runs */
  QFX_MEMORY = 4,   /* there is not enough memory */
  QFX_FAILED = 5    /* anything else */
} qfx_status;

typedef enum {
  QFX_FLOAT32 = 0,
  QFX_INT64 = 1,
  QFX_INT32 = 2,
  QFX_INT8 = 3,
  QFX_UINT8 = 4,
  QFX_BOOL = 5, /* one byte, 0 or 1 */
  QFX_BFLOAT16 = 6,
  QFX_FLOAT16 = 7
} qfx_dtype;

/* An input or a result. `sizes` has `axes` numbers and lives as long as the program. */
typedef struct {
  qfx_dtype dtype;
  int64_t axes;
  const int64_t* sizes;
  int64_t bytes; /* of the whole array */
} qfx_array;

/* A language model: it reads `batch` sequences at a time, of at most `length` tokens. `seen`: the
 * tokens of the longest sequence so far, without padding. */
typedef struct {
  int64_t batch, length, vocabulary, seen;
} qfx_decoder;

/* What was read from a file, with its state: weights, cache, working memory. */
typedef struct qfx_program qfx_program;

/* The version of qfx, for example "0.3.0". Never NULL. */
QFX_API const char* qfx_version(void);

/* What was wrong with the last call on this thread that did not return QFX_OK; "" if there was
 * none. Valid until the next call on this thread. Never NULL. */
QFX_API const char* qfx_error(void);

/* How many threads each call may use, the calling one included, from 1 to 1024. By default the
 * environment variable QFX_NUM_THREADS says so, and without it these are all processors that the
 * process may run on. Idle threads look for work for some tens of microseconds and then sleep. */
QFX_API int qfx_set_threads(int64_t count);

/* Reads a file and sets *program, which qfx_program_free frees; NULL after an error.
 * `max_memory`: the most bytes that weights, cache and working memory may take; 0 for the memory of
 * the machine. */
QFX_API int qfx_program_load(const char* path, int64_t max_memory, qfx_program** program);

/* NULL is allowed. No call for the program may be under way. */
QFX_API void qfx_program_free(qfx_program* program);

/* --- graphs of fixed shapes --- */

/* How many inputs and results there are: 0 of a language model, -1 if `program` is NULL. */
QFX_API int64_t qfx_program_inputs(const qfx_program* program);
QFX_API int64_t qfx_program_results(const qfx_program* program);

/* Describes an input or a result. QFX_ARGUMENT for an index that there is not. */
QFX_API int qfx_program_input(const qfx_program* program, int64_t index, qfx_array* array);
QFX_API int qfx_program_result(const qfx_program* program, int64_t index, qfx_array* array);

/* Runs the graph. `inputs`: an array for each input, which is not written to. `results`: an array
 * for each result, which is filled; they may not overlap inputs. After an error their contents are
 * not defined. Arrays of 0 bytes may be NULL. QFX_ARGUMENT for a language model. */
QFX_API int qfx_program_run(qfx_program* program, const void* const* inputs, void* const* results);

/* --- language models --- */

/* Describes a language model. QFX_ARGUMENT for a graph of fixed shapes. */
QFX_API int qfx_program_decoder(const qfx_program* program, qfx_decoder* decoder);

/* Forgets all tokens: the next ones begin new sequences. */
QFX_API int qfx_program_reset(qfx_program* program);

/* Reads tokens that follow those of earlier calls, and computes the logits of the next one.
 * `tokens`: ids [batch, count]. `attention_mask`: [batch, count], 0 for padding, which must precede
 * the tokens of a sequence; NULL if there is no padding. `logits`: [batch, vocabulary], written.
 * `seen` + `count` may be at most `length`. After an error none of these tokens counts as read. */
QFX_API int qfx_program_read(qfx_program* program, const int64_t* tokens,
                             const uint8_t* attention_mask, int64_t count, float* logits);

#ifdef __cplusplus
}
#endif

#endif
