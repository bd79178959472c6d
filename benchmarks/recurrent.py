"""LSTM and GRU layers in int8 and in 4 bits, against PyTorch in float32 and bfloat16, and against
the dynamic quantization of torch.ao.

Each layer has as many inputs as its state has features. All ways take turns; with one thread the
times are processor seconds.
"""

from __future__ import annotations

import copy
import warnings
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Candidate, clock, interleaved, keep_memory
from benchmarks.question import Question, Row, chosen
from qfx import _C, quantize_
from qfx.nn import Linear
from qfx.ops.single_tensors import sqnr

CASES: dict[str, tuple[Any, int, int]] = {  # class, layers, features
    "lstm-256": (nn.LSTM, 2, 256),
    "lstm-512": (nn.LSTM, 2, 512),
    "lstm-1024": (nn.LSTM, 2, 1024),
    "gru-512": (nn.GRU, 2, 512),
}
FLOAT = "float32"
PEER = "torch.ao dynamic"


class Holder(nn.Module):
    """A model of one recurrent module."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(x)[0]
        return y


def ways(model: nn.Module) -> dict[str, tuple[nn.Module, torch.dtype]]:
    """Returns the modules that are compared, and the dtype of their input."""
    made: dict[str, tuple[nn.Module, torch.dtype]] = {
        FLOAT: (model, torch.float32),
        "bfloat16": (copy.deepcopy(model).bfloat16(), torch.bfloat16),
    }
    for scheme in ("w8a8", "w4a8"):
        made[scheme] = quantize_(copy.deepcopy(model), scheme), torch.float32
    made["w8a8, bfloat16"] = quantize_(copy.deepcopy(model).bfloat16(), "w8a8"), torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        kinds = {nn.LSTM, nn.GRU}
        peer = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), kinds, torch.qint8)
        made[PEER] = peer, torch.float32
    return made


def weight_mb(model: nn.Module) -> float:
    """Returns the megabytes of the weights as they lie in memory; 0 for those of torch.ao, which
    PyTorch keeps in objects of its own."""
    packed = [m.packed.nbytes for m in model.modules() if isinstance(m, Linear)]
    floats = [p.nbytes for p in model.parameters() if p.ndim == 2 and type(p) is nn.Parameter]
    return round(sum(packed or floats) / 1e6, 2)


def measure(name: str, batch: int, steps: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    kind, layers, size = CASES[name]
    model: Any = Holder(kind(size, size, layers)).eval()
    x = torch.randn(steps, batch, size)
    found = ways(model)
    times = interleaved(
        {w: Candidate(partial(module, x.to(dtype))) for w, (module, dtype) in found.items()},
        rounds,
        clock(),
    )
    expected = model(x)
    macs = sum(p.numel() for p in model.parameters() if p.ndim == 2) * steps * batch
    return [
        {"case": name, "batch": batch, "steps": steps, "isa": _C.isa(), "way": way}
        | {"ms": round(1e3 * taken, 3), "of float32": round(times[FLOAT] / taken, 2)}
        | {"of torch.ao": round(times[PEER] / taken, 2), "GMAC/s": round(macs / taken / 1e9, 1)}
        | {"SQNR dB": round(sqnr(expected, found[way][0](x.to(found[way][1])).float()), 1)}
        | {"weights MB": weight_mb(found[way][0])}
        for way, taken in times.items()
    ]


@torch.inference_mode()
def tables(options: Namespace) -> Iterator[list[Row]]:
    keep_memory()
    for name in chosen(options.cases, CASES):
        for batch in options.batches:
            yield measure(name, int(batch), options.steps, options.rounds)


QUESTION = Question(
    "How fast is a recurrent layer in int8, compared with float32 and dynamic quantization?",
    tables,
    key=("case", "batch", "steps", "way"),
    options={"cases": list(CASES), "batches": ["1", "8"], "steps": 100},
    rounds=7,
)
