"""A decoder of transformers in which the repeated layers are compiled once, or each layer
separately."""

from __future__ import annotations

from typing import Any

import torch

import qfx
from benchmarks.decode_static import Case, Static
from benchmarks.decode_ways import ALL


def by(backend: str, case: Case) -> dict[str, Any]:
    """Returns arguments of torch.compile. `backend`: "inductor", or "qfx" with all linears in
    int8."""
    if backend == "inductor":
        return {"backend": case.inner}
    return {"backend": qfx.backend, "options": {"inner": case.inner, **ALL}}


def nested(backend: str, case: Case, model: Any) -> Static:
    """Compiles one graph of the model, in which the layers call one body."""
    kind = type(model.model.layers[0])
    kind.forward = torch.compiler.nested_compile_region(kind.forward)
    return Static(case, model, lambda forward: torch.compile(forward, **by(backend, case)))


def each_layer(backend: str, case: Case, model: Any) -> Static:
    """Compiles a graph for each layer. The layer's number in the cache is a guard, so the layers
    are isolated: otherwise the limit of recompilations, which they share, would leave most of them
    uncompiled. The rest of the model runs eagerly."""
    for layer in model.model.layers:
        layer.compile(isolate_recompiles=True, **by(backend, case))
    return Static(case, model)
