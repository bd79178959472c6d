// The operators' schemas, one line each. Kernels: cpu/ops/*.cpp and cuda/ops/*.cpp. Fake
// implementations, gradients and the references that define them: qfx/ops/*.py. Numbers:
// docs/numerics.md. Tests register the same operators again under another name.
#include <torch/csrc/stable/library.h>

#if !defined(QFX_LIBRARY)
#define QFX_LIBRARY qfx
#endif

// clang-format off
STABLE_TORCH_LIBRARY(QFX_LIBRARY, m) {
  m.def("quantize(Tensor x, int[] code, Tensor? scale=None, Tensor? zero_point=None, Tensor? seed=None, Tensor? factor=None) -> (Tensor, Tensor, Tensor)");
  m.def("rotate(Tensor x, Tensor? factor, int rotation, bool back=False) -> Tensor");
  m.def("fake_quantize(Tensor x, int[] axes, int bits, bool symmetric, ScalarType out_dtype) -> Tensor");
  m.def("dequantize(Tensor q, Tensor scale, Tensor? zero_point, Tensor? col_scale, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
  m.def("pack_weight(Tensor codes, Tensor scale, Tensor? zero_point=None, Tensor? minimum=None, int bits=8, int group=0) -> Tensor");
  m.def("unpack_weight(Tensor weight, SymInt[] layout, SymInt k) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("weight_scale(Tensor weight, SymInt n) -> Tensor");
  m.def("cut_weight(Tensor weight, SymInt[] layout, SymInt k, int dim, SymInt begin, SymInt end, int rotation=0) -> Tensor");
  m.def("int8_mm(Tensor q, Tensor zero_point, Tensor weight, SymInt n) -> Tensor");
  m.def("int8_bmm(Tensor a_q, Tensor a_zero_point, Tensor b_q) -> Tensor");
  m.def("int8_bmm_dynamic(Tensor a, Tensor b, int[] axes, int bits, bool symmetric, int b_bits, ScalarType out_dtype) -> Tensor");
  m.def("int8_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, ScalarType out_dtype) -> Tensor");
  m.def("int8_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal) -> (Tensor, Tensor, Tensor)");
  m.def("attention_decode(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, ScalarType out_dtype) -> Tensor");
  m.def("attention_append(Tensor q, Tensor past_k, Tensor k, Tensor past_v, Tensor v, Tensor? mask, float scale, bool causal, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)");
  m.def("kv_write(Tensor(a!) keys, Tensor(b!) key_scale, Tensor(c!) values, Tensor(d!) value_scale, Tensor k, Tensor v, Tensor places) -> ()");
  m.def("kv_copy_blocks(Tensor(a!) keys, Tensor(b!) key_scale, Tensor(c!) values, Tensor(d!) value_scale, Tensor sources, Tensor blocks) -> ()");
  m.def("kv_keys(Tensor keys, Tensor key_scale, SymInt length, ScalarType out_dtype, Tensor? block_table=None) -> Tensor");
  m.def("kv_values(Tensor values, Tensor value_scale, SymInt length, ScalarType out_dtype, Tensor? block_table=None) -> Tensor");
  m.def("kv_attention(Tensor q, Tensor keys, Tensor key_scale, Tensor values, Tensor value_scale, Tensor? mask, float scale, SymInt length, ScalarType out_dtype, Tensor? block_table=None, float softcap=0.0) -> Tensor");
  m.def("kv_write_pages(Tensor(a!) keys, Tensor(b!) key_scale, Tensor(c!) values, Tensor(d!) value_scale, Tensor k, Tensor v, Tensor slots) -> ()");
  m.def("kv_attention_pages(Tensor q, Tensor keys, Tensor key_scale, Tensor values, Tensor value_scale, Tensor pages, Tensor starts, Tensor lengths, float scale, SymInt window, ScalarType out_dtype, float softcap=0.0) -> Tensor");
  m.def("linear(Tensor q, Tensor scale, Tensor zero_point, Tensor weight, SymInt[] layout, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
  m.def("linear_dynamic(Tensor x, Tensor weight, SymInt[] layout, Tensor? bias, int[] code, str activation, ScalarType out_dtype, Tensor? factor=None) -> Tensor");
  m.def("linears(Tensor x, Tensor[] weight, SymInt[] layout, Tensor?[] bias, int[] code, str[] activation, ScalarType out_dtype, Tensor? factor=None) -> Tensor[]");
  m.def("im2col(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation) -> Tensor");
  m.def("conv_dynamic(Tensor x, Tensor weight, SymInt[] layout, Tensor? bias, int[] kernel, int[] stride, int[] padding, int[] dilation, int[] code, str activation, ScalarType out_dtype, Tensor? factor=None, Tensor? residual=None) -> Tensor");
  m.def("conv_depthwise(Tensor x, Tensor weight, SymInt[] layout, Tensor? bias, int[] kernel, int[] stride, int[] padding, int[] dilation, int[] code, str activation, ScalarType out_dtype) -> Tensor");
  m.def("linear_float(Tensor x, Tensor weight, SymInt[] layout, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
  m.def("linear_experts(Tensor x, Tensor weight, SymInt[] layout, Tensor offsets, Tensor? bias, int[] code, str activation, ScalarType out_dtype, Tensor? factor=None) -> Tensor");
  m.def("experts(Tensor x, Tensor expert, Tensor routing, Tensor up, SymInt[] up_layout, Tensor? up_bias, Tensor down, SymInt[] down_layout, Tensor? down_bias, int[] code, int[] down_code, str activation, str gate, ScalarType out_dtype, float limit=0.0, float shift=0.0) -> Tensor");
  m.def("lstm(Tensor x, Tensor weight, SymInt[] layout, Tensor? bias, Tensor h, Tensor c, int[] code, bool reverse, ScalarType out_dtype, Tensor? batch_sizes=None) -> (Tensor, Tensor, Tensor)");
  m.def("gru(Tensor x, Tensor weight, SymInt[] layout, Tensor? bias, Tensor h, int[] code, bool reverse, ScalarType out_dtype, Tensor? batch_sizes=None) -> (Tensor, Tensor)");
  m.def("linear_ste(Tensor x, Tensor? w, Tensor? bias, Tensor? x_step, Tensor? w_step, Tensor[] codes, Tensor weight, SymInt[] layout, int[] code, Tensor? seed, ScalarType out_dtype, Tensor? factor=None) -> Tensor");
  m.def("linear_guarded(Tensor x, Tensor w, Tensor weight, SymInt[] layout, Tensor error, Tensor? bias, float guard, str site, int[] code, str activation, ScalarType out_dtype, Tensor? factor=None) -> Tensor");
  m.def("linear_requantize(Tensor q, Tensor scale, Tensor zero_point, Tensor weight, SymInt[] layout, Tensor? bias, str activation, Tensor out_scale, Tensor? out_zero_point, int[] out_code) -> (Tensor, Tensor, Tensor)");
  m.def("binary_pack(Tensor w) -> Tensor");
  m.def("binary_mm(Tensor x, Tensor packed, SymInt n) -> Tensor");
  m.def("binary_linear(Tensor x, Tensor packed, Tensor scale, Tensor? bias, str activation, ScalarType out_dtype) -> Tensor");
}
