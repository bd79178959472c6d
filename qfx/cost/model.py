"""The interface of cost models, which predict the times of a matmul, and the model of each
device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from qfx.match.base import Match
from qfx.ops.forms import form_of
from qfx.values.scheme import QSpec, Scheme


@dataclass(frozen=True)
class Work:
    """One call of a matmul whose time is to be predicted: `batch` matmuls of M x K by K x N, or
    attentions of M queries and N keys with K features. `dtype` is the dtype of the float matmul. A
    linear has a scheme; `outliers` of its K features are multiplied in float in addition. `pixels`:
    those that are read for a row, if it is a window of an image; `gathered`, if the window is
    rotated as a whole, since its pixels have no whole blocks. `quads`: of a depthwise convolution,
    the taps of a kernel in fours; then `pixels` counts those of the whole input."""

    kind: str
    m: int
    k: int
    n: int
    dtype: torch.dtype
    batch: int = 1
    scheme: Scheme | None = None
    outliers: int = 0
    pixels: int = 0
    gathered: bool = False
    quads: int = 0

    @classmethod
    def linear(
        cls, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme, outliers: int = 0
    ) -> Work:
        kind = form_of(scheme).name
        return cls(kind, m, k, n, dtype, scheme=scheme, outliers=outliers)

    @property
    def x(self) -> QSpec | None:
        """The quantization of a linear's activations; None if they stay float."""
        return None if self.scheme is None else self.scheme.x

    @property
    def rotated(self) -> bool:
        """Whether blocks of K are rotated."""
        return self.scheme is not None and self.scheme.block(self.k) > 0


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one call of a matmul in float and in int8, or, for decoding, in
    PyTorch's attention of one query and in `attention_decode`. `source`: a text that says whose
    times these are; empty for this machine's own."""

    float_s: float
    int8_s: float
    source: str = ""

    @property
    def gain(self) -> float:
        return self.float_s / self.int8_s

    @property
    def text(self) -> str:
        """A text that says how many times faster int8 is than float, and where the two times come
        from unless they were measured on this machine, for example "1.80x float"."""
        return f"{self.gain:.2f}x float{self.source and ' '}{self.source}"


class CostModel(Protocol):
    """Predicts times on one device, for all work for which `lacks` returns None."""

    def lacks(self, kind: str, dtype: torch.dtype, scheme: Scheme | None) -> str | None:
        """Returns the reason why work of this kind, dtype and scheme cannot be predicted, or
        None."""
        ...

    def estimate(self, work: Work) -> Estimate: ...

    def packing(self, work: Work) -> float:
        """Returns the seconds to quantize and pack the weight of a linear."""
        ...

    def training(self, work: Work) -> float:
        """Returns the seconds that training adds to the int8 forward of a linear in each step."""
        ...


GpuCosts = Callable[[torch.device], CostModel | str]  # the model of a GPU, or why there is none


class Costs(NamedTuple):
    """The cost models of all devices; None if there are no measurements."""

    cpu: CostModel | None = None
    gpus: GpuCosts | None = None

    def of(self, match: Match, kind: str, scheme: Scheme | None) -> CostModel | str | None:
        """Returns the cost model for the device of a matched matmul, the reason why none can
        predict this kind of work there, or None if the device has no cost model."""
        cpu = match.device.type == "cpu"
        model = self.cpu if cpu else self.gpus and self.gpus(match.device)
        if model is None or isinstance(model, str):
            return model
        return model.lacks(kind, match.float_type, scheme) or model
