"""Tells Inductor which operators have a C function that packages of AOTInductor can call directly
(csrc/package_calls.cpp). Other operators are called through PyTorch's proxy executor and the
dispatcher, where autograd's kernels in Python run unless the call is made in inference mode."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

DEVICES = ("cpu", "cuda")
# Name of the operator -> arguments of its C function, in the order of the schema.
ARGUMENTS: Mapping[str, str] = {
    "linear_dynamic": (
        "AtenTensorHandle x, AtenTensorHandle weight, const int64_t* layout, int64_t layout_size, "
        "const AtenTensorHandle* bias, const int64_t* code, int64_t code_size, "
        "const char* activation, int32_t out_dtype, const AtenTensorHandle* factor, "
        "AtenTensorHandle* y"
    ),
}


def declare_package_calls() -> None:
    """Adds the C functions to Inductor's configuration, where its code generator looks for them, if
    Inductor has been imported. Importing it takes longer than importing qfx, so this is called
    whenever shapes are computed, which happens before code is generated."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None:
        _declare(config)


@cache
def _declare(config: Any) -> None:
    import torch

    known = getattr(config.aot_inductor, "custom_ops_to_c_shims", None)
    if known is None:
        return
    own = {
        getattr(torch.ops.qfx, name).default: [
            f"AOTITorchError aoti_torch_{device}_{name}({arguments})" for device in DEVICES
        ]
        for name, arguments in ARGUMENTS.items()
    }
    config.aot_inductor.custom_ops_to_c_shims = {**known, **own}
