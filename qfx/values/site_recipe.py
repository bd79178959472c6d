"""The entries of a recipe: SiteRecipe for a matmul with a constant operand, PinnedProduct for a
matmul of two activations or an attention. Both are frozen, and inconsistent fields are rejected on
creation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qfx.io.errors import UserError, printable
from qfx.values.rounding import Rounding
from qfx.values.scheme import PER_COLUMN, Scheme

LEAST_INT8 = 4  # at most one column of this many may stay float
_SMALLEST, _LARGEST = 2.0**-149, (2 - 2.0**-23) * 2.0**127  # of float32
_SMALLEST_SCALE = 2.0**-126  # the smallest scale that kernels accept
_SIZES = range(2**63)


@dataclass(frozen=True)
class SiteRecipe:
    """The decision of calibration on one matmul with a constant right operand.

    `name`: as in a `Plan`. `call`: its index among the matmuls of that name in one graph. `n`, `k`:
    out and in features. `scheme`: None if it stays float; `reason` then says why. `factor`: [K]; x
    is multiplied and w divided by it before both are quantized (docs/numerics.md (R1)). `scale` and
    `zero_point`: the static ones of x if `scheme.x` is static. `sqnr_db`: the SQNR of the output in
    dB, if measured. `outliers`: the columns of K, in ascending order and at most K / 4, that are
    multiplied in float in addition to the others (R3). `rounding`: the codes of the weight if they
    are not rounded to nearest. `divergence`: the predicted change of the model's output if only
    this matmul is int8 (D1), if predicted. `tokens`: of a product of experts, the number of rows
    that calibration saw for each expert; such an entry has no factor, static scale or outliers, its
    name is that of the parameter, and the codes are [E, N, K]. Raises ValueError for inconsistent
    fields.
    """

    name: str
    call: int
    n: int
    k: int
    scheme: Scheme | None
    factor: tuple[float, ...] | None = None
    scale: float | None = None
    zero_point: int | None = None
    sqnr_db: float | None = None
    reason: str = ""
    outliers: tuple[int, ...] = ()
    rounding: Rounding | None = None
    divergence: float | None = None
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        fault = self._fault_of_types() or self._fault()
        if fault:
            raise UserError(f"recipe of {self}: {fault}")

    def _fault_of_types(self) -> str | None:
        if not (isinstance(self.name, str) and isinstance(self.reason, str)):
            return f"name={self.name!r} and reason={self.reason!r} must be strings"
        for what, value in (("call", self.call), ("n", self.n), ("k", self.k)):
            if type(value) is not int or value not in _SIZES:
                return f"{what}={value!r} must be an integer of at least 0"
        if not isinstance(self.scheme, Scheme | None):
            return f"scheme={self.scheme!r} must be a qfx.Scheme or None"
        if not all(isinstance(values, tuple) for values in (self.factor or (), self.outliers)):
            return "factor and outliers must be tuples"
        if self.sqnr_db is not None and not _is_number(self.sqnr_db):
            return f"sqnr_db={self.sqnr_db!r} must be a number"
        if self.divergence is not None and not _is_positive(self.divergence):
            return f"divergence={self.divergence!r} must be a finite number of at least 0"
        if not isinstance(self.rounding, Rounding | None):
            return f"rounding={self.rounding!r} must be a Rounding or None"
        if not _are_counts(self.tokens):
            return f"tokens={self.tokens!r} must be a tuple of integers of at least 0, or None"
        return None

    def _fault(self) -> str | None:
        scheme, x = self.scheme, self.scheme.x if self.scheme else None
        if scheme is None and not (self.factor is self.scale is self.zero_point is None):
            return "the site stays float (scheme=None), so it cannot have a factor or scale"
        if self.tokens is not None and (self.outliers or not (self.factor is self.scale is None)):
            return "a product of experts (tokens is not None) has no factor, scale or outliers"
        if self.factor is not None and len(self.factor) != self.k:
            return f"factor has {len(self.factor)} elements, and K={self.k} needs {self.k}"
        if not _are_factors(factor := self.factor or ()):
            at = next(i for i, value in enumerate(factor) if not _are_factors((value,)))
            return f"factor[{at}]={factor[at]!r} must be positive and finite in float32"
        if scheme and scheme.w.axes == PER_COLUMN and self.factor is not None:
            return f"{scheme} computes its factor from the weight: leave factor=None"
        if x and x.axes == PER_COLUMN and self.factor is None:
            return f"{scheme} needs a factor of K={self.k} elements, and factor is None"
        if x and x.static and self.scale is None:
            return f"{scheme} needs a static scale, and scale is None"
        if self.scale is not None and not (x and x.static):
            return f"{scheme} has no static scale: leave scale=None, not {self.scale!r}"
        if self.scale is not None and not _is_scale(self.scale):
            return f"scale={self.scale!r} must be a normal positive float32"
        if self.zero_point is not None and not (x and x.static and not x.symmetric):
            return f"{scheme} has no static zero point: leave zero_point=None"
        if self.zero_point is not None and x and not _is_code(self.zero_point, x.bits):
            half = 2 ** (x.bits - 1)
            return f"zero_point={self.zero_point!r} must be an integer from {-half} to {half - 1}"
        if self.outliers and (fault := self._fault_of_outliers()):
            return fault
        return self._fault_of_rounding(self.rounding.codes) if self.rounding else None

    def _fault_of_rounding(self, codes: Tensor) -> str | None:
        if self.scheme is None:
            return "the site stays float (scheme=None), so it cannot have codes"
        if self.scheme.w.axes == PER_COLUMN:
            return f"{self.scheme} computes its factor from the weight: leave rounding=None"
        wanted = [self.n, self.k] if self.tokens is None else [len(self.tokens), self.n, self.k]
        if list(codes.shape) != wanted:
            form = "[N, K]" if self.tokens is None else f"[{len(self.tokens)}, N, K]"
            shape = list(codes.shape)
            return f"its codes have shape {shape}, and N={self.n} K={self.k} needs {form}"
        top, w = 2 ** (self.scheme.w.bits - 1), self.scheme.w
        low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
        least = -top + w.symmetric
        if low < least or high >= top:
            between = f"between {least} and {top - 1}"
            return f"its codes go from {low} to {high}, and {self.scheme} has codes {between}"
        return None

    def _fault_of_outliers(self) -> str | None:
        if self.scheme is None:
            return "the site stays float (scheme=None), so it cannot have outliers"
        if self.scheme.w.axes == PER_COLUMN:
            return f"{self.scheme} computes its factor from the weight: leave outliers=()"
        if not all(type(i) is int and 0 <= i < self.k for i in self.outliers):
            return f"outliers {listed(self.outliers)} must be columns from 0 to K-1={self.k - 1}"
        if list(self.outliers) != sorted(set(self.outliers)):
            return f"outliers {listed(self.outliers)} must be in ascending order, each once"
        if len(self.outliers) * LEAST_INT8 > self.k:
            count, most = len(self.outliers), self.k // LEAST_INT8
            return f"it has {count} outliers, and at most K/{LEAST_INT8}={most} are allowed"
        return None

    def __str__(self) -> str:
        return printable(f"{self.name}[{self.call}]" if self.call else self.name)


@dataclass(frozen=True)
class PinnedProduct:
    """The decision on a matmul of two activations or an attention: int8 under `scheme`, or float,
    where an attention of one query may use `attention_decode`. `name`, `call`: as in `SiteRecipe`,
    with `call` counted among the matmuls of two activations and the attentions of a graph. Raises
    ValueError for inconsistent fields."""

    name: str
    call: int
    scheme: Scheme | None = None
    decodes: bool = False

    def __post_init__(self) -> None:
        numbered = type(self.call) is int and self.call in _SIZES
        known = isinstance(self.scheme, Scheme | None) and isinstance(self.decodes, bool)
        if not (isinstance(self.name, str) and numbered and known):
            raise UserError(
                f"recipe: PinnedProduct has name={self.name!r}, call={self.call!r}, "
                f"scheme={self.scheme!r}, decodes={self.decodes!r}; expected a string, an integer "
                "of at least 0, a qfx.Scheme or None, and a bool"
            )
        if self.decodes and self.scheme is not None:
            raise UserError(
                f"recipe of {self}: with decodes=True it computes in float: leave scheme=None, not "
                f"{self.scheme}"
            )
        if self.scheme is not None and not self.scheme.fits_activations:
            raise UserError(
                f"recipe of {self}: {self.scheme} cannot quantize a product of two activations: "
                'choose a scheme as "w8a8", or scheme=None for float'
            )

    def __str__(self) -> str:
        return printable(f"{self.name}[{self.call}]" if self.call else self.name)


def _are_counts(tokens: Any) -> bool:
    whole = isinstance(tokens, tuple) and all(type(t) is int and t in _SIZES for t in tokens)
    return tokens is None or whole


def _is_number(value: Any) -> bool:
    """Whether a value is a number. NaN is not, nor an integer too large for a float."""
    if type(value) is int:
        return value in _SIZES or -value in _SIZES
    return isinstance(value, float) and value == value


def _are_factors(values: tuple[Any, ...]) -> bool:
    """Whether all values are positive and finite in float32. Tuples of floats are checked together:
    a model has some 100,000 of them."""
    if values and {*map(type, values)} == {float}:
        whole = not math.isnan(sum(values))
        return whole and min(values) >= _SMALLEST and max(values) <= _LARGEST
    return all(_is_number(f) and _SMALLEST <= f <= _LARGEST for f in values)


def _is_positive(value: Any) -> bool:
    """Whether a value is a finite number of at least 0."""
    return _is_number(value) and 0 <= value <= _LARGEST


def _is_scale(value: Any) -> bool:
    return _is_number(value) and _SMALLEST_SCALE <= value <= _LARGEST


def _is_code(value: Any, bits: int) -> bool:
    return type(value) is int and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)


def listed(columns: Sequence[int]) -> str:
    """Returns the first few columns as text."""
    return ", ".join(map(str, columns[:4])) + (", ..." if len(columns) > 4 else "")
