"""Captured graphs as if their tensors were on a GPU, where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from qfx import _C
from qfx.graph.capture import value


def as_if_built(patch: pytest.MonkeyPatch) -> None:
    """This build counts as one with CUDA kernels, of those operators that have them."""
    without = ("attention", "guarded", "append", "cut_weight", "linears")
    has = lambda name, key: not (key == "CUDA" and any(word in name for word in without))  # noqa: E731
    patch.setattr(_C, "cuda_architectures", lambda: ["90a"])
    patch.setattr("qfx.host.operators.has_kernel", has)


def on_cuda(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm`, what its capture recorded moved to a GPU as fake tensors. Its constants stay real, so
    that the graph runs on CPU tensors whatever the stages made of it."""
    mode = FakeTensorMode()
    for node in gm.graph.nodes:
        recorded = value(node)
        if isinstance(recorded, Tensor):
            node.meta.pop("example_value", None)
            node.meta["val"] = fake(mode, recorded)
    return gm


def fake(mode: FakeTensorMode, like: Tensor) -> Tensor:
    """A tensor of the same kind on a GPU, without memory."""
    with mode:
        sizes = like.shape, like.stride()
        made = torch.empty_strided(*sizes, dtype=like.dtype, device="cuda")
    return made.requires_grad_(like.requires_grad)
