"""Recipe: what calibration decided for each call site, as a value and as a JSON file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tabulate import tabulate

from qfx.values.atomic_write import write_text
from qfx.values.errors import UserError
from qfx.values.printable import printable
from qfx.values.scheme import PER_COLUMN, QSpec, Scheme

VERSION = 1  # of the JSON
LEAST_INT8 = 4  # at most one column of so many may stay float
_SMALLEST, _LARGEST = 2.0**-149, (2 - 2.0**-23) * 2.0**127  # of float32
_SMALLEST_SCALE = 2.0**-126  # kernels take no smaller one
_SIZES = range(2**63)
_HEAD = ("module", "KxN", "scheme", "factor", "static scale", "outliers", "SQNR dB", "reason")


@dataclass(frozen=True)
class SiteRecipe:
    """What calibration decided for one matmul with a constant right operand.

    `name`: as in a `Plan`; `call`: its place among the sites of that name in one graph. `n`, `k`:
    out and in features. `scheme`: None when it stays float, and `reason` says why. `factor`: [K],
    x is multiplied and w divided by it before both are quantized (docs/numerics.md (R1)). `scale`
    and `zero_point`: of x, where `scheme.x` is static. `sqnr_db`: of the site's output, if
    measured. `outliers`: the columns of K, in order and at most K / 4, that are multiplied in float
    beside the others (R3). Raises ValueError where these do not fit together.
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

    def __post_init__(self) -> None:
        fault = self._fault_of_types() or self._fault()
        if fault:
            raise UserError(f"recipe of {self}: {fault}")

    def _fault_of_types(self) -> str | None:
        if not (isinstance(self.name, str) and isinstance(self.reason, str)):
            return f"the name {self.name!r} or the reason {self.reason!r} is no text"
        for what, value in (("call", self.call), ("n", self.n), ("k", self.k)):
            if type(value) is not int or value not in _SIZES:
                return f"{what}={value!r} is no size"
        if not isinstance(self.scheme, Scheme | None):
            return f"the scheme {self.scheme!r} is none"
        if not all(isinstance(values, tuple) for values in (self.factor or (), self.outliers)):
            return "the factor or the outliers are no tuple"
        if self.sqnr_db is not None and not _is_number(self.sqnr_db):
            return f"the SQNR {self.sqnr_db!r} is no number"
        return None

    def _fault(self) -> str | None:
        scheme, x = self.scheme, self.scheme.x if self.scheme else None
        if scheme is None and not (self.factor is self.scale is self.zero_point is None):
            return "a factor, scale or zero point for a site that stays float"
        if self.factor is not None and len(self.factor) != self.k:
            return f"the factor has {len(self.factor)} elements for K={self.k}"
        if not all(_is_number(f) and _SMALLEST <= f <= _LARGEST for f in self.factor or ()):
            return "the factor has an element that is not positive and finite in float32"
        if scheme and scheme.w.axes == PER_COLUMN and self.factor is not None:
            return f"{scheme} takes its factor from the weight, not from a recipe"
        if x and x.axes == PER_COLUMN and self.factor is None:
            return f"{scheme} needs a factor"
        if x and x.static and self.scale is None:
            return f"{scheme} needs a static scale"
        if self.scale is not None and not (x and x.static):
            return f"a static scale for {scheme}"
        if self.scale is not None and not _is_scale(self.scale):
            return f"the scale {self.scale!r} is no normal positive float32"
        if self.zero_point is not None and not (x and x.static and not x.symmetric):
            return f"a zero point for {scheme}"
        if self.zero_point is not None and x and not _is_code(self.zero_point, x.bits):
            return f"the zero point {self.zero_point!r} is no code of {x.bits} bits"
        return self._fault_of_outliers() if self.outliers else None

    def _fault_of_outliers(self) -> str | None:
        if self.scheme is None:
            return "outliers for a site that stays float"
        if self.scheme.w.axes == PER_COLUMN:
            return f"{self.scheme} takes its factor from the weight, which leaves no outliers apart"
        if not all(type(i) is int and 0 <= i < self.k for i in self.outliers):
            return f"the outliers {_listed(self.outliers)} are no columns of K={self.k}"
        if list(self.outliers) != sorted(set(self.outliers)):
            return f"the outliers {_listed(self.outliers)} are not in ascending order"
        if len(self.outliers) * LEAST_INT8 > self.k:
            return f"{len(self.outliers)} outliers are more than K/{LEAST_INT8} of K={self.k}"
        return None

    def __str__(self) -> str:
        return printable(f"{self.name}[{self.call}]" if self.call else self.name)


@dataclass(frozen=True)
class PinnedProduct:
    """What was decided of a matmul of two activations, or an attention: int8 under `scheme`, or
    float, an attention of one query perhaps by `attention_decode`. `name`, `call`: as of a
    `SiteRecipe`, among the products and attentions of a graph. Raises ValueError where these do not
    fit together."""

    name: str
    call: int
    scheme: Scheme | None = None
    decodes: bool = False

    def __post_init__(self) -> None:
        numbered = type(self.call) is int and self.call in _SIZES
        known = isinstance(self.scheme, Scheme | None) and isinstance(self.decodes, bool)
        if not (isinstance(self.name, str) and numbered and known):
            raise UserError(f"recipe: {self.name!r}, call {self.call!r}, is no pinned product")
        if self.decodes and self.scheme is not None:
            raise UserError(f"recipe of {self}: attention_decode is float, not {self.scheme}")
        if self.scheme is not None and not self.scheme.fits_activations:
            raise UserError(f"recipe of {self}: {self.scheme} does not serve two activations")

    def __str__(self) -> str:
        return printable(f"{self.name}[{self.call}]" if self.call else self.name)


def _is_number(value: Any) -> bool:
    """NaN is none, nor is an integer that no float is near to."""
    if type(value) is int:
        return value in _SIZES or -value in _SIZES
    return isinstance(value, float) and value == value


def _is_scale(value: Any) -> bool:
    return _is_number(value) and _SMALLEST_SCALE <= value <= _LARGEST


def _is_code(value: Any, bits: int) -> bool:
    return type(value) is int and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)


@dataclass(frozen=True)
class Recipe:
    """What `qfx.calibrate` or `qfx.pin` found: one `SiteRecipe` for each call site. What it does
    not name goes the usual way; unless `pinned`, the products and attentions of a whole plan, is
    given: then all else stays float. Prints as a table."""

    sites: tuple[SiteRecipe, ...]
    pinned: tuple[PinnedProduct, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        if self.pinned is not None:
            object.__setattr__(self, "pinned", tuple(self.pinned))
        if twice := _twice(self.sites) | _twice(self.pinned or ()):
            raise UserError(f"recipe: {', '.join(sorted(twice))} is there twice")

    @property
    def names(self) -> frozenset[str]:
        """Of all that it decides."""
        return frozenset(s.name for s in self.sites) | {p.name for p in self.pinned or ()}

    def __str__(self) -> str:
        lines = [*map(_line, self.sites), *map(_pinned_line, self.pinned or ())]
        return tabulate(lines, _HEAD, disable_numparse=True)

    def to_json(self) -> str:
        """JSON text with a version, a line for each site; `from_json` gives an equal recipe."""
        pinned = "" if self.pinned is None else f', "pinned": {_listing(self.pinned)}'
        return f'{{"qfx_recipe": {VERSION}, "sites": {_listing(self.sites)}{pinned}}}'

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Raises ValueError for what `to_json` of this version did not write."""
        raw = _parsed(text)
        version = raw.get("qfx_recipe") if isinstance(raw, dict) else None
        if version is None:
            raise UserError("this is no recipe of qfx: it has no qfx_recipe version")
        if type(version) is not int or version != VERSION:
            raise UserError(f"a recipe of version {version!r}; this qfx reads version {VERSION}")
        if unknown := sorted(raw.keys() - {"qfx_recipe", "sites", "pinned"}):
            raise UserError(f"this recipe has an unknown part {', '.join(map(repr, unknown))}")
        try:
            pinned = raw.get("pinned")
            products = None if pinned is None else tuple(map(_product, _list(pinned)))
            return cls(tuple(map(_site, _list(raw["sites"]))), products)
        except (TypeError, KeyError, AttributeError) as why:
            raise UserError(f"this recipe has sites that are none: {why}") from None

    def save(self, path: str | Path) -> None:
        """Writes `to_json`. Raises OSError, and leaves an earlier file as it was."""
        write_text(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Raises OSError without the file, ValueError for one that is no recipe."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def _twice(values: Sequence[SiteRecipe | PinnedProduct]) -> set[str]:
    counts = Counter((value.name, value.call) for value in values)
    return {str(value) for value in values if counts[value.name, value.call] > 1}


def _line(site: SiteRecipe) -> Sequence[str]:
    factor, scale = site.factor, site.scale
    spread = "" if factor is None else f"{min(factor):.3g} to {max(factor):.3g}"
    zero = "" if site.zero_point is None else f", zero {site.zero_point}"
    return (
        str(site),
        f"{site.k}x{site.n}",
        str(site.scheme or "float"),
        spread,
        "" if scale is None else f"{scale:.4g}{zero}",
        _listed(site.outliers),
        "" if site.sqnr_db is None else f"{site.sqnr_db:.1f}",
        printable(site.reason),
    )


def _pinned_line(product: PinnedProduct) -> Sequence[str]:
    token = "float, attention_decode" if product.decodes else str(product.scheme or "float")
    return (str(product), "", token, *[""] * (len(_HEAD) - 4), "of two activations")


def _listing(values: Sequence[SiteRecipe | PinnedProduct]) -> str:
    lines = ",\n".join(json.dumps(asdict(value)) for value in values)
    return f"[\n{lines}\n]"


def _listed(columns: Sequence[int]) -> str:
    return ", ".join(map(str, columns[:4])) + (", ..." if len(columns) > 4 else "")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as why:
        raise UserError(f"this is no recipe of qfx: it is not JSON, {why}") from None
    except RecursionError:
        raise UserError("this is no recipe of qfx: it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys must differ: of two equal ones the last would count."""
    counts = Counter(key for key, _ in pairs)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise UserError(f"this is no recipe of qfx: {twice[0]!r} is there twice in one object")
    return dict(pairs)


def _list(raw: Any) -> list[Any]:
    if not isinstance(raw, list):
        raise TypeError(f"{raw!r} is no list")
    return raw


def _site(raw: dict[str, Any]) -> SiteRecipe:
    known = {f.name for f in fields(SiteRecipe)}
    if unknown := sorted(raw.keys() - known):
        raise TypeError(f"unknown field {', '.join(unknown)}")
    scheme, factor = raw["scheme"], raw["factor"]
    return SiteRecipe(
        **{
            **raw,
            "scheme": None if scheme is None else _scheme(scheme),
            "factor": None if factor is None else tuple(_list(factor)),
            "outliers": tuple(_list(raw.get("outliers", []))),  # earlier builds wrote none
        }
    )


def _product(raw: dict[str, Any]) -> PinnedProduct:
    scheme = raw["scheme"]
    return PinnedProduct(**{**raw, "scheme": None if scheme is None else _scheme(scheme)})


def _scheme(raw: dict[str, Any]) -> Scheme:
    x = None if raw["x"] is None else _spec(raw["x"])
    return Scheme(**{**raw, "x": x, "w": _spec(raw["w"])})


def _spec(raw: dict[str, Any]) -> QSpec:
    return QSpec(**{**raw, "axes": tuple(_list(raw["axes"]))})
