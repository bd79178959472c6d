"""Uses Inductor as the compiler of rewritten graphs: its options, the checks that its code may
omit, and additions to the keys of PyTorch's caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from qfx.host.inductor_calls import call_linears_directly
from qfx.host.inductor_convolutions import call_convolutions_directly
from qfx.host.operators import OpOverload, OpOverloadPacket
from qfx.host.partitioner import Rewrite, partitioner

Compiled = Callable[..., Any]


def inductor(
    options: Mapping[str, Any],
    mode: str | None,
    operators: Sequence[Any],
    digest: str,
    rewrite_saved: Rewrite | None = None,
) -> Compiled:
    """Returns a function that compiles a graph with Inductor, with the user's options and those of
    `mode`.

    `operators`: operators of qfx, whose inputs are to be computed into memory once, and whose
    results have the sizes and strides that their fake implementations say. `digest`: a digest of
    the code that is compiled together with the graph, for the keys of caches. `rewrite_saved`:
    edits what the forward graph of a training step saves.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    options_of_mode = {**(list_mode_options(mode) if mode else {}), **options}
    if rewrite_saved is not None:
        given = {**known_options(), **options_of_mode}["custom_partitioner_fn"]
        options_of_mode["custom_partitioner_fn"] = partitioner(rewrite_saved, digest, given)
    _read_inputs_where_they_are(operators)
    call_linears_directly(digest)
    call_convolutions_directly(digest)
    known = {"aten", "prims", *(str(each).partition(".")[0] for each in operators)}

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        with in_cache_keys(digest):
            patches = {**settings(gm, known), **options_of_mode}
            return compile_fx(gm, inputs, config_patches=patches)  # type: ignore[return-value]

    return compile_graph


def in_cache_keys(digest: str) -> AbstractContextManager[Any]:
    """Returns a context in which `digest` is part of the cache keys, after the user's own tag.

    Backward formulas are traced into the compiled code, and AOTAutograd's cache on disk knows only
    the forward graph. Without `digest`, a changed formula would be served from an old cache.
    """
    config = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag}{digest}")  # type: ignore[attr-defined,no-any-return]


def settings(gm: fx.GraphModule, known: set[str]) -> dict[str, Any]:
    """Returns Inductor's options for a graph, which are used unless the user sets them. `known`:
    namespaces of operators whose results need no check."""
    found: dict[str, Any] = {"size_asserts": _has_foreign_operators(gm, known)}
    if _takes_addcdiv_apart():
        found["eager_numerics.division_rounding"] = True
    return found


def known_options() -> Mapping[str, Any]:
    """Returns Inductor's options and their values."""
    import torch._inductor.config

    return torch._inductor.config.get_config_copy()


def _read_inputs_where_they_are(operators: Sequence[Any]) -> None:
    """Makes Inductor compute a tensor that several of these operators use into memory once. By
    default it would give each operator that it does not know a copy, computed again. Edits global
    state, but only adds qfx's operators to Inductor's set."""
    from torch._inductor.lowering import add_needs_realized_inputs

    add_needs_realized_inputs([*operators])


def _takes_addcdiv_apart() -> bool:
    """Whether Inductor decomposes addcdiv, as in PyTorch 2.11. Quantization uses addcdiv for its
    divisions. On a GPU the divisions of a decomposed addcdiv are rounded to nearest only if an
    option says so."""
    from torch._inductor.decomposition import select_decomp_table

    return torch.ops.aten.addcdiv.default in select_decomp_table()


def _has_foreign_operators(gm: fx.GraphModule, known: set[str]) -> bool:
    """Whether the graph calls operators of libraries other than PyTorch and qfx, so that Inductor
    has to check the sizes and strides of inputs and results at every call. Otherwise the check is
    omitted: Dynamo has guarded the inputs, and tests ensure that results are as promised during
    compilation."""
    bodies = (m for m in gm.modules() if isinstance(m, fx.GraphModule))
    targets = (node.target for body in bodies for node in body.graph.nodes)
    operators = (t for t in targets if isinstance(t, OpOverload | OpOverloadPacket))
    return bool({str(t).partition(".")[0] for t in operators} - known)
