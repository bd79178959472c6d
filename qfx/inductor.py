"""Inductor as the compiler of rewritten graphs: what it is told, and what its code need not do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from qfx.capture import targets
from qfx.ops import FAKES
from qfx.version import in_cache_keys

Compiled = Callable[..., Any]


def inductor(options: dict[str, Any], mode: str | None) -> Compiled:
    """Inductor with the user's options and those of `mode`."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    given = {**(list_mode_options(mode) if mode else {}), **options}
    _read_inputs_where_they_are()

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        with in_cache_keys():
            return compile_fx(gm, inputs, config_patches={**settings(gm), **given})  # type: ignore[return-value]

    return compile_graph


def settings(gm: fx.GraphModule) -> dict[str, Any]:
    """Inductor's options for a graph, where the user has said nothing else."""
    found: dict[str, Any] = {"size_asserts": _has_foreign_operators(gm)}
    if _takes_addcdiv_apart():
        found["eager_numerics.division_rounding"] = True
    return found


def _read_inputs_where_they_are() -> None:
    """What several operators read is computed into memory once. Inductor would do so by itself, but
    for operators that it meets for the first time: those get a copy each, computed anew."""
    from torch._inductor.lowering import add_needs_realized_inputs

    add_needs_realized_inputs([getattr(torch.ops.qfx, name) for name in FAKES])


def _takes_addcdiv_apart() -> bool:
    """Whether the divisions of `qfx.inline` are ordinary ones to Inductor, as in PyTorch 2.11: on a
    GPU it rounds those to nearest only if told to."""
    from torch._inductor.decomposition import select_decomp_table

    return torch.ops.aten.addcdiv.default in select_decomp_table()


def _has_foreign_operators(gm: fx.GraphModule) -> bool:
    """Inductor checks sizes and strides of each input and of each operator's result at every call.
    Dynamo has guarded the inputs, and for PyTorch's operators and ours what is promised while
    compiling is tested; other libraries' may break that promise."""
    operators = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    libraries = {str(t).partition(".")[0] for t in targets(gm) if isinstance(t, operators)}
    return bool(libraries - {"aten", "prims", "qfx"})
