"""What a matmul is predicted to take, and which cost model knows it on which device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from qfx.match.base import Match
from qfx.values.scheme import Scheme


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one call of a site, in float and in int8."""

    float_s: float
    int8_s: float

    @property
    def gain(self) -> float:
        return self.float_s / self.int8_s


class CostModel(Protocol):
    """Predicts a site's times from its shape; `dtype` is that of the float matmul."""

    def estimate(
        self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme, outliers: int = 0
    ) -> Estimate:
        """`outliers`: how many of the k columns are multiplied in float beside the others."""
        ...

    def estimate_bmm(self, batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> Estimate:
        """Of `batch` products of two activations."""
        ...

    def estimate_attention(
        self, batch: int, m: int, k: int, n: int, dtype: torch.dtype
    ) -> Estimate:
        """Of `batch` attentions of m queries and n keys with k features."""
        ...

    def estimate_decode(self, batch: int, k: int, n: int, dtype: torch.dtype) -> float:
        """How many times as fast as PyTorch's attention of one query `attention_decode` is."""
        ...

    def packing(self, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> float:
        """Seconds to quantize and pack a weight [n, k]."""
        ...

    def training(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> float:
        """Seconds that training adds to a step's int8 forward."""
        ...


# The model of a GPU for sites of this type and scheme, None for batches; or why there is none.
GpuCosts = Callable[[torch.device, torch.dtype, Scheme | None], CostModel | str]


class Costs(NamedTuple):
    """The cost models of all devices; None: no measurements are at hand."""

    cpu: CostModel | None = None
    gpus: GpuCosts | None = None

    def of(self, match: Match, scheme: Scheme | None) -> CostModel | str | None:
        """That of the device of a site of this scheme, or why there is none."""
        if match.device.type == "cpu":
            return self.cpu
        return self.gpus and self.gpus(match.device, match.float_type, scheme)
