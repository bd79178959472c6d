"""Row: what is known of one matmul of a model, a line of `qfx.explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

import qfx._C as _C
from qfx.graph.capture import value
from qfx.host.shapes import hint
from qfx.match.base import FLOAT
from qfx.match.operator_calls import OwnCall
from qfx.match.site import Site
from qfx.ops.forms import form_of
from qfx.ops.guard_counts import GuardCount
from qfx.ops.storage import stored_bytes
from qfx.plan.plan import Entry
from qfx.values.scheme import PER_COLUMN, Scheme


@dataclass(frozen=True)
class Row:
    """One matmul. Times in seconds for one call, `measured` on the given input or else predicted.

    `sqnr_db`: signal to quantization noise of this site's output alone, for the input that it gets.
    `transform`: of K before quantization, docs/numerics.md (R1): `factor`, `R64` or `factor+R64`.
    `input_max`, `input_rms`: greatest absolute value and root mean square of its left operand in
    the call. `guarded`: what the guard found in the call, None without one. `divergence`: what the
    recipe predicts that this site changes at the model's output (D1), if it does. `weight_bytes`:
    what its weight takes as it is stored, scales included, which a call of few rows reads; `bits`:
    of an element of it. None of matmuls without a constant operand, and on a GPU. `lookup`: an int8
    embedding, which multiplies nothing.
    """

    module: str
    node: str
    shape: str
    scheme: str
    kernel: str
    reason: str
    sqnr_db: float | None = None
    float_s: float | None = None
    int8_s: float | None = None
    measured: bool = False
    transform: str = ""
    input_max: float | None = None
    input_rms: float | None = None
    guarded: GuardCount | None = None
    divergence: float | None = None
    weight_bytes: int | None = None
    bits: float | None = None
    lookup: bool = False

    @property
    def outlier_ratio(self) -> float | None:
        """input_max / input_rms: 1 where all elements are alike, at most the root of their number.

        None where the input was not seen, or is zero.
        """
        return self.input_max / self.input_rms if self.input_max and self.input_rms else None


class Range(NamedTuple):
    """The size of the elements of a tensor."""

    input_max: float
    input_rms: float


class SiteMeasurement(NamedTuple):
    """A site's form in int8, run beside the float one: SQNR in dB, None where both give the same by
    what they are, seconds of both, and what its guard, if it has one, found."""

    sqnr_db: float | None
    float_s: float
    int8_s: float
    guarded: GuardCount | None = None


def range_of(x: Tensor) -> Range:
    if not x.numel():
        return Range(0.0, 0.0)
    largest = x.abs().max().double()
    if not largest.isfinite() or not largest:
        return Range(largest.item(), largest.item())
    return Range(largest.item(), (largest * (x / largest).square().mean().sqrt()).item())


def shares(rows: Sequence[Row]) -> tuple[float | None, ...]:
    """Returns the share of each row in the error of all rows, 0 to 1, or None if unknown.

    The error is the divergence if a recipe predicts it, and otherwise noise power relative to
    signal. Only the divergence tells which site costs most at the model's output.
    """
    predicted = any(row.divergence is not None for row in rows)
    parts = [row.divergence if predicted else _noise(row) for row in rows]
    total = max(sum(part for part in parts if part is not None), 1e-300)
    return tuple(None if part is None else part / total for part in parts)


def _noise(row: Row) -> float | None:
    """Relative to signal, the noisiest of all at most so that they add up."""
    return None if row.sqnr_db is None else 10 ** min(-row.sqnr_db / 10, 300)


def float_rows(row: Row) -> str:
    """Returns "float rows/all rows" of the call under a guard, or '' without a guard."""
    return "" if row.guarded is None else f"{row.guarded.float_rows}/{row.guarded.rows}"


def row_of(entry: Entry, seen: Range | None, measured: SiteMeasurement | None) -> Row:
    """The row of a plan's entry. What was not measured has the times that the plan predicted."""
    estimate = entry.estimate
    predicted = (estimate.float_s, estimate.int8_s) if estimate else (None, None)
    sqnr_db, float_s, int8_s, guarded = measured or (None, *predicted, None)
    return Row(
        module=entry.match.path,
        node=entry.match.node.name,
        shape=entry.match.shape,
        scheme=entry.token,
        kernel="" if entry.token == FLOAT else _kernel(entry),
        reason=entry.reason,
        sqnr_db=sqnr_db,
        float_s=float_s,
        int8_s=int8_s,
        measured=measured is not None,
        transform=_transform(entry),
        guarded=guarded,
        divergence=entry.recipe.divergence if entry.recipe and entry.scheme else None,
        **_weight(entry),
        **(seen._asdict() if seen else {}),
    )


def _weight(entry: Entry) -> dict[str, Any]:
    match, (n, k) = entry.match, (hint(entry.match.n), hint(entry.match.k))
    stored = match.stored if isinstance(match, OwnCall) else None
    if isinstance(match, Site) and match.device.type == "cpu" and n and k:
        scheme, weight = entry.scheme, value(match.weight)
        stored = stored_bytes(scheme.w, scheme.group, n, k) if scheme else None
        if scheme is None and isinstance(weight, Tensor):
            stored = weight.numel() * weight.element_size()
    return {"weight_bytes": stored, "bits": 8 * stored / (n * k) if stored and n and k else None}


def _kernel(entry: Entry) -> str:
    """The GEMM kernel of the site: tile and instruction set; the latter alone of other forms."""
    scheme, m = entry.scheme, hint(entry.match.m)
    gemm = form_of(scheme).gemm if scheme else entry.match.gemm
    if m is None or not gemm:
        return _C.isa()
    return _C.kernel_for(m).removeprefix("s8s8_gemm_")


def _transform(entry: Entry) -> str:
    if entry.scheme is None or not entry.match.weights:
        return ""
    given = entry.recipe is not None and entry.recipe.factor is not None
    return transform_of(entry.scheme, hint(entry.match.k), given)


def transform_of(scheme: Scheme, k: int | None, smoothed: bool) -> str:
    """Returns the words for what is done to K before it is quantized: "factor", "R64" or both."""
    factor, block = smoothed or scheme.w.axes == PER_COLUMN, scheme.block(k)
    return "+".join(["factor"] * factor + [f"R{block}"] * bool(block))
