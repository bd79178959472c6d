// The operators' schemas, one line each. Kernels: cpu/ops_*.cpp, cuda/ops_*.cpp. Fake
// implementations, gradients and the references that define them: qfx/ops/*.py. Numbers:
// docs/numerics.md. Tests register the same operators again under another name.
#include <torch/csrc/stable/library.h>

#if !defined(QFX_LIBRARY)
#define QFX_LIBRARY qfx
#endif

// clang-format off
STABLE_TORCH_LIBRARY(QFX_LIBRARY, m) {
  m.def("quantize(Tensor x, int[] axes, int bits, bool symmetric, Tensor? factor=None, int rotation=0) -> (Tensor, Tensor, Tensor)");
  m.def("quantize_groups(Tensor x, int group, int bits, bool symmetric, Tensor? factor=None, int rotation=0) -> (Tensor, Tensor, Tensor)");
  m.def("rotate(Tensor x, Tensor? factor, int rotation, bool back=False) -> Tensor");
  m.def("quantize_static(Tensor x, Tensor scale, Tensor? zero_point, int bits, bool symmetric, Tensor? factor=None, int rotation=0) -> (Tensor, Tensor, Tensor)");
  m.def("quantize_stochastic(Tensor x, Tensor seed, int[] axes, int bits, Tensor? factor=None) -> (Tensor, Tensor, Tensor)");
  m.def("fake_quantize(Tensor x, int[] axes, int bits, bool symmetric, ScalarType out_dtype) -> Tensor");
  m.def("dequantize(Tensor q, Tensor scale, Tensor? zero_point, Tensor? col_scale, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
  m.def("pack_weight(Tensor w, int group=0) -> Tensor");
  m.def("unpack_weight(Tensor packed, SymInt n, SymInt k) -> Tensor");
  m.def("int8_mm(Tensor q, Tensor zero_point, Tensor packed, SymInt n) -> Tensor");
  m.def("int8_bmm(Tensor a_q, Tensor a_zero_point, Tensor b_q) -> Tensor");
  m.def("int8_bmm_dynamic(Tensor a, Tensor b, int[] axes, int bits, bool symmetric, int b_bits, ScalarType out_dtype) -> Tensor");
  m.def("int8_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, ScalarType out_dtype) -> Tensor");
  m.def("attention_decode(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, ScalarType out_dtype) -> Tensor");
  m.def("attention_append(Tensor q, Tensor past_k, Tensor k, Tensor past_v, Tensor v, Tensor? mask, float scale, bool causal, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)");
  m.def("kv_write(Tensor(a!) keys, Tensor(b!) key_scale, Tensor(c!) values, Tensor(d!) value_scale, Tensor k, Tensor v, Tensor places) -> ()");
  m.def("kv_copy_blocks(Tensor(a!) keys, Tensor(b!) key_scale, Tensor(c!) values, Tensor(d!) value_scale, Tensor sources, Tensor blocks) -> ()");
  m.def("kv_keys(Tensor keys, Tensor key_scale, SymInt length, ScalarType out_dtype, Tensor? block_table=None) -> Tensor");
  m.def("kv_values(Tensor values, Tensor value_scale, SymInt length, ScalarType out_dtype, Tensor? block_table=None) -> Tensor");
  m.def("kv_attention(Tensor q, Tensor keys, Tensor key_scale, Tensor values, Tensor value_scale, Tensor? mask, float scale, SymInt length, ScalarType out_dtype, Tensor? block_table=None, float softcap=0.0) -> Tensor");
  m.def("int8_linear(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
  m.def("int8_linear_groups(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale, Tensor? w_zero, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
  m.def("int8_linear_requantize(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale, Tensor? bias, str activation, Tensor out_scale, Tensor? out_zero_point, int bits, bool symmetric) -> (Tensor, Tensor, Tensor)");
  m.def("int8_weight_linear(Tensor x, Tensor packed, Tensor w_scale, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
  m.def("int8_linear_ste(Tensor x, Tensor? w, Tensor? bias, Tensor? x_step, Tensor? w_step, Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale, int[] w_axes, int bits, int w_bits, bool symmetric, Tensor? seed, ScalarType out_dtype, Tensor? factor=None, int rotation=0) -> Tensor");
  m.def("int8_linear_groups_ste(Tensor x, Tensor? bias, Tensor? x_step, Tensor q, Tensor scale, Tensor zero_point, Tensor packed, Tensor w_scale, Tensor? w_zero, int w_group, int bits, bool symmetric, ScalarType out_dtype, Tensor? factor=None, int rotation=0) -> Tensor");
  m.def("int8_linear_dynamic(Tensor x, Tensor packed, Tensor w_scale, Tensor? bias, int[] axes, int bits, bool symmetric, str activation, ScalarType out_dtype, Tensor? factor=None, int rotation=0) -> Tensor");
  m.def("int8_linear_groups_dynamic(Tensor x, Tensor packed, Tensor w_scale, Tensor? w_zero, Tensor? bias, int[] axes, int group, int bits, bool symmetric, str activation, ScalarType out_dtype, Tensor? factor=None, int rotation=0) -> Tensor");
  m.def("int8_linear_guarded(Tensor x, Tensor w, Tensor packed, Tensor w_scale, Tensor error, Tensor? bias, float guard, str site, int[] axes, int bits, bool symmetric, str activation, ScalarType out_dtype, Tensor? factor=None, int rotation=0) -> Tensor");
  m.def("int8_linear_groups_guarded(Tensor x, Tensor w, Tensor packed, Tensor w_scale, Tensor? w_zero, Tensor error, Tensor? bias, float guard, str site, int[] axes, int group, int bits, bool symmetric, str activation, ScalarType out_dtype, Tensor? factor=None, int rotation=0) -> Tensor");
  m.def("pack_lowbit(Tensor codes, Tensor scale, Tensor? zero_point, Tensor? minimum, int bits, int group) -> Tensor");
  m.def("unpack_lowbit(Tensor packed, SymInt n, SymInt k, int group) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("lowbit_linear(Tensor q, Tensor scale, Tensor zero_point, Tensor packed, SymInt n, int w_bits, int w_group, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
  m.def("lowbit_linear_dynamic(Tensor x, Tensor packed, SymInt n, int w_bits, int w_group, Tensor? bias, int[] axes, int group, int bits, bool symmetric, str activation, ScalarType out_dtype, Tensor? factor=None, int rotation=0) -> Tensor");
  m.def("lowbit_linear_ste(Tensor x, Tensor? bias, Tensor? x_step, Tensor q, Tensor scale, Tensor zero_point, Tensor packed, SymInt n, int w_bits, int w_group, int bits, bool symmetric, ScalarType out_dtype, Tensor? factor=None, int rotation=0) -> Tensor");
  m.def("lowbit_weight_linear(Tensor x, Tensor packed, SymInt n, int w_bits, int w_group, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
  m.def("binary_pack(Tensor w) -> Tensor");
  m.def("binary_mm(Tensor x, Tensor packed, SymInt n) -> Tensor");
  m.def("binary_linear(Tensor x, Tensor packed, Tensor scale, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
}
