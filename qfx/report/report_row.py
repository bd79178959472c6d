"""Row: the findings about one matmul of a model, a line of `qfx.explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

import qfx._C as _C
from qfx.graph.capture import value
from qfx.host.shapes import hint
from qfx.match.base import FLOAT
from qfx.match.experts import ExpertProduct
from qfx.match.grouped import GroupedConvolution
from qfx.match.operator_calls import OwnCall
from qfx.match.recurrent import RecurrentSteps
from qfx.match.site import Site
from qfx.nn.attention_gradients import CLOSE
from qfx.ops.forms import form_of
from qfx.ops.guard_counts import GuardCount
from qfx.ops.storage import stored_bytes
from qfx.plan.plan import Entry
from qfx.values.scheme import PER_COLUMN, Scheme


@dataclass(frozen=True)
class Row:
    """One matmul of a model. Times are in seconds for one call, `measured` on the given input or
    else predicted.

    `sqnr_db`: the SQNR of the output of this matmul alone, for the input that it gets. `transform`:
    what is done along K before quantization, docs/numerics.md (R1): `factor`, `R64` or
    `factor+R64`. `input_max`, `input_rms`: the largest absolute value and the root mean square of
    the left operand in the call. `guarded`: the counts of the guard in the call; None without a
    guard. `divergence`: how much this matmul changes the model's output (D1), as the recipe
    predicts; None without a prediction. `weight_bytes`: the bytes of the stored weight with its
    scales, all of which a call with few tokens reads; of the weights of experts those that the call
    can read, one for each row at most. `bits`: the stored bits per element of the
    weight. Both are None for a matmul of two activations, and on a GPU. `lookup`: the row is an
    int8 embedding, which multiplies nothing. `gradient_cosine`: of an attention, with
    backward="int8": the least cosine of its gradients in int8 with those in float, for random
    gradients of its output.
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
    gradient_cosine: float | None = None

    @property
    def outlier_ratio(self) -> float | None:
        """input_max / input_rms: 1 if all elements have the same size, at most the square root of
        their number. None if the input was not seen or is zero."""
        return self.input_max / self.input_rms if self.input_max and self.input_rms else None


class Range(NamedTuple):
    """The size of the elements of a tensor."""

    input_max: float
    input_rms: float


class SiteMeasurement(NamedTuple):
    """The measurement of a matmul or module that was run in int8 and in float. `sqnr_db`: None if
    both give the same output by construction, as lookups in the same table do. `float_s`, `int8_s`:
    seconds for one call. `guarded`: the counts of the guard, None without one. `gradient_cosine`:
    as in `Row`."""

    sqnr_db: float | None
    float_s: float
    int8_s: float
    guarded: GuardCount | None = None
    gradient_cosine: float | None = None


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
    signal. Only the divergence says which matmul changes the model's output most.
    """
    predicted = any(row.divergence is not None for row in rows)
    parts = [row.divergence if predicted else _noise(row) for row in rows]
    total = max(sum(part for part in parts if part is not None), 1e-300)
    return tuple(None if part is None else part / total for part in parts)


def _noise(row: Row) -> float | None:
    """Returns the noise power relative to the signal, at most 1e300 so that sums stay finite; None
    if the row has no SQNR."""
    return None if row.sqnr_db is None else 10 ** min(-row.sqnr_db / 10, 300)


def float_rows(row: Row) -> str:
    """Returns the number of rows that the guard ran in float and the number of all rows of the
    call, as "float rows/all rows"; '' without a guard."""
    return "" if row.guarded is None else f"{row.guarded.float_rows}/{row.guarded.rows}"


def row_of(entry: Entry, seen: Range | None, measured: SiteMeasurement | None) -> Row:
    """Returns the row for an entry of a plan. Without `measured`, the times are those that the plan
    predicted."""
    estimate = entry.estimate
    predicted = (estimate.float_s, estimate.int8_s) if estimate else (None, None)
    sqnr_db, float_s, int8_s, guarded, cosine = measured or (None, *predicted, None, None)
    return Row(
        module=entry.match.path,
        node=entry.match.node.name,
        shape=entry.match.shape,
        scheme=entry.token,
        kernel="" if entry.token == FLOAT else _kernel(entry),
        reason=entry.reason + _of_gradients(cosine),
        gradient_cosine=cosine,
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


def _of_gradients(cosine: float | None) -> str:
    if cosine is None:
        return ""
    low = f", below {CLOSE}: `skip` leaves it float" if cosine < CLOSE else ""
    return f"; the cosine of its int8 gradients is {cosine:.4f}{low}"


def _weight(entry: Entry) -> dict[str, Any]:
    match, (n, k) = entry.match, (hint(entry.match.n), hint(entry.match.k))
    stored = match.stored if isinstance(match, OwnCall) else None
    several = ExpertProduct | GroupedConvolution | RecurrentSteps
    site = match.site if isinstance(match, several) else match
    count = 1
    if isinstance(site, Site) and match.device.type == "cpu" and n and k:
        scheme, weight = entry.scheme, value(site.weight)
        count = max(min(site.experts, hint(match.m) or site.experts), 1)
        stored = count * stored_bytes(scheme.w, scheme.group, n, k) if scheme else None
        if scheme is None and isinstance(weight, Tensor):
            stored = weight.numel() * weight.element_size() * count // max(site.experts, 1)
    bits = 8 * stored / (count * n * k) if stored and n and k else None
    return {"weight_bytes": stored, "bits": bits}


def _kernel(entry: Entry) -> str:
    """Returns the kernel of an int8 matmul: tile and instruction set, or only the instruction set
    if no GEMM kernel computes it."""
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
