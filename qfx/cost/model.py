"""What a matmul is predicted to take, and which cost model knows it on which device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from qfx.match.attention import Attention
from qfx.match.kinds import Site, device_of
from qfx.match.products import Product
from qfx.values.scheme import QSpec, Scheme


def kind_of(scheme: Scheme) -> str:
    """The kind of work that a linear of this scheme is, a row of `qfx.cost.kinds`."""
    if scheme.x is None:
        return "weight_only"
    return "groups" if scheme.grouped else "int8"


@dataclass(frozen=True)
class Work:
    """One call of a matmul: `batch` products of M x K by K x N, or attentions of M queries and N
    keys with K features. `dtype` is that of the float matmul. A linear has a scheme; `outliers` of
    its K features are multiplied in float beside the others."""

    kind: str
    m: int
    k: int
    n: int
    dtype: torch.dtype
    batch: int = 1
    scheme: Scheme | None = None
    outliers: int = 0

    @classmethod
    def linear(
        cls, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme, outliers: int = 0
    ) -> Work:
        return cls(kind_of(scheme), m, k, n, dtype, scheme=scheme, outliers=outliers)

    @property
    def x(self) -> QSpec | None:
        """How a linear's activations become codes; None where they stay float."""
        return None if self.scheme is None else self.scheme.x

    @property
    def rotated(self) -> bool:
        """Whether blocks of K are rotated."""
        return self.scheme is not None and self.scheme.block(self.k) > 0


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one call of a site, in float and in int8; or in PyTorch's attention of
    one query and in `attention_decode`."""

    float_s: float
    int8_s: float

    @property
    def gain(self) -> float:
        return self.float_s / self.int8_s


class CostModel(Protocol):
    """Predicts times on one device, of all work that `lacks` finds nothing for."""

    def lacks(self, kind: str, dtype: torch.dtype, scheme: Scheme | None) -> str | None:
        """Why work of this kind, type and scheme cannot be predicted, or None."""
        ...

    def estimate(self, work: Work) -> Estimate: ...

    def packing(self, work: Work) -> float:
        """Seconds to quantize and pack the weight of a linear."""
        ...

    def training(self, work: Work) -> float:
        """Seconds that training adds to a step's int8 forward of a linear."""
        ...


GpuCosts = Callable[[torch.device], CostModel | str]  # the model of a GPU, or why there is none


class Costs(NamedTuple):
    """The cost models of all devices; None: no measurements are at hand."""

    cpu: CostModel | None = None
    gpus: GpuCosts | None = None

    def of(
        self, match: Site | Product | Attention, scheme: Scheme | None
    ) -> CostModel | str | None:
        """The model of a match's device, or why none can predict it under this scheme."""
        device = device_of(match)
        model = self.cpu if device.type == "cpu" else self.gpus and self.gpus(device)
        if model is None or isinstance(model, str):
            return model
        dtype = match.out_dtype if isinstance(match, Site) else match.dtype
        kind = batch_kind(match) if scheme is None else kind_of(scheme)
        return model.lacks(kind, dtype or torch.float32, scheme) or model


def batch_kind(match: Site | Product | Attention) -> str:
    """The kind of work that a match without a constant operand is."""
    return "attentions" if isinstance(match, Attention) else "products"
