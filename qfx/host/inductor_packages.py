"""Tells Inductor which operators have a C function that packages of AOTInductor can call directly
(csrc/api/package_calls.cpp). Other operators are called through PyTorch's proxy executor and the
dispatcher, where autograd's kernels in Python run unless the call is made in inference mode."""

from __future__ import annotations

import importlib
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
    """Adds the C functions to Inductor's configuration while it makes a package, and takes them
    away afterwards: the configuration is part of the keys of Inductor's caches, and what contains
    an operator is no key. Called whenever shapes are computed, which happens before code is
    generated."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is not None:
        _set_declared(virtualized.V.aot_compilation is True)


_BEFORE: list[dict[Any, Any]] = []  # the user's own, while ours are there


def _set_declared(wanted: bool) -> None:
    if wanted == bool(_BEFORE):
        return
    config = importlib.import_module("torch._inductor.config").aot_inductor
    if wanted and hasattr(config, "custom_ops_to_c_shims"):
        _BEFORE.append(config.custom_ops_to_c_shims)
        config.custom_ops_to_c_shims = {**_BEFORE[0], **_own()}
    elif _BEFORE:
        config.custom_ops_to_c_shims = _BEFORE.pop()


@cache
def _own() -> dict[Any, list[str]]:
    import torch

    return {
        getattr(torch.ops.qfx, name).default: [
            _declaration(f"aoti_torch_{device}_{name}", name, arguments) for device in DEVICES
        ]
        for name, arguments in ARGUMENTS.items()
    }


def _declaration(function: str, name: str, arguments: str) -> str:
    """Returns the declaration of a C function, behind a check that it is there. A package in a
    process without qfx would otherwise not be loaded, for the lack of a symbol whose name does not
    say where it comes from."""
    given = ", ".join(each.split()[-1].lstrip("*") for each in arguments.split(","))
    return f"""AOTITorchError {function}({arguments}) __attribute__((weak));
static inline AOTITorchError qfx_{function}({arguments}) {{
    if ({function} == nullptr) {{
        throw std::runtime_error("the package calls qfx::{name}: import qfx before it is loaded");
    }}
    return {function}({given});
}}
#define {function} qfx_{function}
static_assert(true)"""
