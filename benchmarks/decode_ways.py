"""The ways in which benchmarks/decode.py runs a language model of transformers, by PyTorch.

Each has a function that makes a `Decoder` from a float32 model; peers from other libraries are in
benchmarks/decode_peers.py. A static cache is used everywhere, so that all ways read the same number
of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import qfx
from benchmarks.decode_exported import exported
from benchmarks.decode_programs import Programs
from benchmarks.decode_static import Case, Decoder, Static

BF16 = "bfloat16"


@dataclass(frozen=True)
class Way:
    """A way to decode. `make(case, model)` returns a Decoder of the float32 model, which it may
    change. `packages`: those it needs, by their names for pip."""

    make: Callable[[Case, Any], Decoder]
    packages: tuple[str, ...] = ()


def eager(case: Case, model: Any) -> Static:
    return Static(case, model)


def inductor(case: Case, model: Any) -> Static:
    return Static(case, model, partial(torch.compile, backend=case.inner))


def compiled(options: dict[str, Any], case: Case, model: Any) -> Static:
    options = {"inner": case.inner, **options}
    return Static(case, model, partial(torch.compile, backend=qfx.backend, options=options))


def quantized(scheme: str, case: Case, model: Any) -> Static:
    return Static(case, qfx.quantize_(model, qfx.Config(scheme=scheme)))


def quantized_compiled(scheme: str, case: Case, model: Any) -> Static:
    model = qfx.quantize_(model, qfx.Config(scheme=scheme))
    return Static(case, model, partial(torch.compile, backend=case.inner))


def in_bfloat16(make: Callable[[Case, Any], Decoder], case: Case, model: Any) -> Decoder:
    model.config.dtype = torch.bfloat16  # which its cache has
    return make(case, model.to(torch.bfloat16))


ALL = {"minimum_gain": 0}
EAGER = "float32 eager"
WAYS: dict[str, Way] = {
    EAGER: Way(eager),
    "float32 Inductor": Way(inductor),
    "float32 exported": Way(partial(exported, None)),
    "qfx generate w8a8": Way(partial(Programs, "w8a8")),
    f"qfx generate w8a8 {BF16}": Way(partial(in_bfloat16, partial(Programs, "w8a8"))),
    f"qfx generate w4a8 {BF16}": Way(partial(in_bfloat16, partial(Programs, "w4a8"))),
    f"{BF16} eager": Way(partial(in_bfloat16, eager)),
    "qfx generate w5a8": Way(partial(Programs, "w5a8")),
    "qfx generate w4a8": Way(partial(Programs, "w4a8")),
    "qfx": Way(partial(compiled, {})),
    "qfx w8a8": Way(partial(compiled, ALL)),
    "qfx w8a8-groups": Way(partial(compiled, {**ALL, "scheme": "w8a8-groups"})),
    "qfx w5a8": Way(partial(compiled, {**ALL, "scheme": "w5a8"})),
    "qfx w4a8": Way(partial(compiled, {**ALL, "scheme": "w4a8"})),
    "qfx quantize_": Way(partial(quantized, "w8a8")),
    "qfx quantize_ by Inductor": Way(partial(quantized_compiled, "w8a8")),
    "qfx w8a8 exported": Way(partial(exported, qfx.Config(minimum_gain=0))),
    "qfx w4a8 exported": Way(partial(exported, qfx.Config(minimum_gain=0, scheme="w4a8"))),
}
