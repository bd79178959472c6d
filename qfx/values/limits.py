"""Limits of int8 matmuls: the float dtypes, the largest K, and the least K that is worth it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from qfx.host.tensors import wraps_tensors

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_K = 65792  # docs/numerics.md (G1)
_PER_OUTPUT = 6  # operations per output that only int8 has: (G1), (E1), (P1)
_WIDTH = 32 // 8  # int8 elements that replace one float32 in a vector register
LEAST_K = _PER_OUTPUT * _WIDTH // (_WIDTH - 1)
FEWEST_INPUTS = 64  # of a recurrent layer
_FIRST_INPUT = re.compile(r"(?:weight_)?ih(?:_l0(?:_reverse)?)?")  # as PyTorch names its weight
FEWEST_OUTPUTS = 8  # of a group of channels: a kernel computes 32 side by side
FEWEST_SAVED = 4096  # elements of an activation that is saved in int8: below, nothing is gained
NARROWEST_SAVED = 32  # of its rows: below, scales would outweigh the codes
SERVED = "int8 serves float32, bfloat16 and float16"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unserved_type(tensor: Tensor) -> str:
    """Returns what int8 does not support about a tensor's type, in words that complete "is", or ''
    if it supports the type. Does not read the tensor."""
    if tensor.is_nested:
        return "a nested tensor"
    if wraps_tensors(tensor):
        return f"a {type(tensor).__name__}, a tensor subclass"
    if tensor.dtype not in FLOATS:
        return f"{short(tensor.dtype)}; {SERVED}"
    if tensor.layout != torch.strided:
        return f"of the layout {tensor.layout}, to_dense() makes it dense"
    return ""


def why_few_features(k: int | None) -> str | None:
    """Returns why a matmul over `k` features stays float unless a recipe decides otherwise. Returns
    None if `k` is large enough or unknown.

    Int8 saves at most `k * (1 - 1 / 4)` multiply-adds of an output and adds 6 operations to it
    (docs/numerics.md (P1)), so with fewer than 8 features it takes more than it saves.
    """
    if k is None or k >= LEAST_K:
        return None
    return f"K={k}: below {LEAST_K} features int8 takes more operations than it saves"


def why_few_inputs(k: int | None, names: Iterable[str]) -> str | None:
    """Returns why the product of a recurrent layer's input with `k` features stays float unless a
    recipe decides otherwise; None if `k` is large enough or unknown, or the names of the matmul are
    not those of such a product, as `rnn.ih_l0` and `rnn.weight_ih_l0` are.

    So few features are measured values, such as the powers of a spectrum, which may span more
    orders of magnitude than 8 bits hold, and they take a small part of the layer's time. The input
    of a further layer is a state, whose values lie between -1 and 1.
    """
    if k is None or k >= FEWEST_INPUTS:
        return None
    if not any(_FIRST_INPUT.fullmatch(name.rpartition(".")[2]) for name in names):
        return None
    return f"K={k}: below {FEWEST_INPUTS} features the input of a recurrent layer stays float"
