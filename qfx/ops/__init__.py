"""The operators `torch.ops.qfx.*`. Their schemas and kernels are in C++. This package contains,
for each operator, its reference (the definition in PyTorch), its fake implementation and its
gradient."""

import sys

from qfx.ops import (
    attention,
    attention_backward,
    attention_decode,
    binary,
    bmm,
    convolution,
    cuda_float_linear,
    depthwise,
    experts,
    experts_backward,
    experts_ste,
    flops,
    guard,
    kv_attention,
    kv_blocks,
    kv_cache,
    kv_pages,
    legacy_operators,
    linear,
    quantize,
    recurrent,
    recurrent_backward,
    recurrent_float,
    rotation,
    sharding,
    ste,
    weight,
)
from qfx.ops.registry import FAKES, REFERENCES

__all__ = [
    "FAKES",
    "REFERENCES",
    "attention",
    "attention_backward",
    "attention_decode",
    "binary",
    "bmm",
    "convolution",
    "cuda_float_linear",
    "depthwise",
    "experts",
    "experts_backward",
    "experts_ste",
    "flops",
    "guard",
    "kv_attention",
    "kv_blocks",
    "kv_cache",
    "kv_pages",
    "legacy_operators",
    "linear",
    "quantize",
    "recurrent",
    "recurrent_backward",
    "recurrent_float",
    "rotation",
    "sharding",
    "ste",
    "weight",
]  # fmt: skip

if "torch.distributed.tensor" in sys.modules:  # else where one of them is met first
    sharding.register()
