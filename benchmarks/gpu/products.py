"""Products on a GPU: the highest speeds, the fastest correct kernel by shape, and ratios to
bfloat16.

The sweep gives the rows of csrc/cuda/sm90/measured.inc. `must` is the bar of a ratio: float seconds
divided by int8 seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.check import PORTABLE, choices, forced, right
from benchmarks.gpu.session import Call, Row, Session
from qfx.ops.code import Code
from qfx.ops.layout import layout_of
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec
from qfx.weights.cache import pack

OPS = torch.ops.qfx
GROUPS, ROWS = Packing(QSpec(bits=4, group=64)), Packing(QSpec())
ASYMMETRIC = list(Code(symmetric=0))
SIZE, COPY_BYTES = 8192, 2**30
# K, N of projections, MLPs and a vocabulary of 7 and 8 billion parameters
LAYERS = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024), (2048, 2048), (8192, 8192))
SWEPT = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
KINDS = {"s8": ("kCodes", 8), "b1": ("kBits", 1)}  # the names of sm90::Operands, and bits


@dataclass(frozen=True)
class Linear:
    """The operands of x [m, k] @ w [n, k].T: random floats, and the codes of both."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    codes: tuple[Tensor, Tensor, Tensor]
    weight: Tensor
    layout: list[int]

    @classmethod
    def random(
        cls,
        session: Session,
        m: int,
        k: int,
        n: int,
        dtype: torch.dtype = torch.bfloat16,
        packing: Packing = ROWS,
        bias: bool = False,
    ) -> Linear:
        x, w = session.random(m, k, dtype=dtype), session.random(n, k, dtype=dtype) / k**0.5
        term = session.random(n, dtype=dtype) if bias else None
        layout = layout_of(packing.spec, packing.group, n)
        return cls(x, w, term, OPS.quantize(x, ASYMMETRIC), pack(w, (), packing).weight, layout)

    def in_float(self) -> Tensor:
        return F.linear(self.x, self.w, self.bias)

    def product(self, activation: str = "none") -> Tensor:
        """Multiplies the codes, with the epilogue."""
        return OPS.linear(*self.codes, *self._rest(activation))  # type: ignore[no-any-return]

    def weight_only(self) -> Tensor:
        return OPS.linear_float(self.x, *self._rest("none"))  # type: ignore[no-any-return]

    def dynamic(self, activation: str = "none") -> Tensor:
        """Quantizes x and multiplies, in one operator."""
        weight, layout, bias, *end = self._rest(activation)
        return OPS.linear_dynamic(self.x, weight, layout, bias, ASYMMETRIC, *end)  # type: ignore

    def _rest(self, activation: str) -> tuple[object, ...]:
        return self.weight, self.layout, self.bias, activation, self.x.dtype


def copies(session: Session, *sizes: Any, **more: Any) -> list[Linear]:
    """Returns enough random linears that the codes of their weights do not stay in the L2 cache."""
    first = Linear.random(session, *sizes, **more)
    count = min(-(-session.past_l2 // max(first.w.numel(), 1)), 64)
    return [first, *(Linear.random(session, *sizes, **more) for _ in range(count - 1))]


def calls(linears: list[Linear], method: str, *arguments: object) -> list[Call]:
    return [partial(getattr(linear, method), *arguments) for linear in linears]


def ceilings(session: Session) -> Iterator[Row]:
    """Yields the speeds of copying, and of the largest products of bfloat16, int8 and signs."""
    size = session.size(SIZE)
    source = torch.zeros(session.size(COPY_BYTES), dtype=torch.int8, device=session.device)
    copied = session.seconds(partial(torch.empty_like(source).copy_, source))
    yield {"what": "copy", "TB/s": 2 * len(source) / copied / 1e12}
    linear = Linear.random(session, size, size, size)
    q, w_q = linear.codes[0], OPS.quantize(linear.w, list(Code()))[0]
    x, signs = linear.x.float(), OPS.binary_pack(linear.w.float())

    def reached(what: str, call: Call, **more: str) -> Row:
        took = session.seconds(call)
        speed = 2 * size**3 / took / 1e12
        return {"what": what, "size": size, "TOPS": speed, "ms": took * 1e3, **more}

    yield reached("bf16", linear.in_float)
    yield reached("torch._int_mm", partial(torch._int_mm, q, w_q.T))
    products: dict[str, tuple[str, Call]] = {
        "s8": ("int8", linear.product),
        "b1": ("b1", lambda: OPS.binary_mm(x, signs, size)),
    }
    for operands, (what, call) in products.items():
        for kernel in choices(right(session, operands), size):
            with forced(kernel):
                yield reached(what, call, kernel=kernel)


def sweep(session: Session) -> Iterator[Row]:
    """Yields for each shape the best choice, and the times of all choices."""
    for operands, layers in (("s8", LAYERS), ("b1", LAYERS[:1])):
        for k, n in layers[:1] if session.dry else layers:
            for m in SWEPT[:2] if session.dry else SWEPT:
                yield _best(session, operands, m, session.size(k), session.size(n))


def _best(session: Session, operands: str, m: int, k: int, n: int) -> Row:
    linears = copies(session, m, k, n)
    timed_calls = calls(linears, "product")
    if operands == "b1":
        x, packed = linears[0].x.float(), OPS.binary_pack(linears[0].w.float())
        timed_calls = [partial(OPS.binary_mm, x, packed, n)]
    us = {}
    for kernel in choices(right(session, operands), m):
        with forced(kernel):
            us[kernel] = round(session.seconds(*timed_calls) * 1e6, 2)
    best = min(us, key=us.__getitem__) if us else None
    return {"operands": operands, "m": m, "k": k, "n": n, "best": best, "us": us}


def nearest(session: Session, m: int, k: int, n: int) -> str:
    """Returns the kernel that csrc/cuda/sm90/choice.cpp chooses with these rows: that of the
    nearest sizes. A measured m below the requested one adds an octave to the distance. If the sweep
    was skipped it returns "": qfx then chooses by the rows that it was built with."""
    if not session.of("sweep"):
        return ""
    rows = [r for r in session.of("sweep") if r.get("operands") == "s8" and r["best"]]

    def distance(row: Row) -> float:
        pairs = ((row["m"], m), (row["k"], k), (row["n"], n))
        return sum(abs(math.log2(a) - math.log2(b)) for a, b in pairs) + (row["m"] < m)

    return min(rows, key=distance)["best"] if rows else PORTABLE


def write_measured(session: Session) -> Path:
    """Writes measured.inc in the format described by its comment."""
    lines = []
    for row in session.of("sweep"):
        if row.get("best"):
            kernel, _, splits = row["best"].partition("/")
            kind, bits = KINDS[row["operands"]]
            sizes = f"{{1, {row['m']}, {row['n']}, {-(-row['k'] * bits // 8)}}}"
            head = f'"{session.name}", sm90::Operands::{kind}'
            lines.append(f'{{{head}, {sizes}, {{"{kernel}", {splits or 1}}}}},\n')
    path = session.out / "measured.inc"
    path.write_text("".join(lines))
    return path


@dataclass(frozen=True)
class Case:
    """A shape x [m, k] @ w [n, k].T. `judged`: which of the timed ways the bar applies to."""

    m: int
    n: int
    k: int
    judged: str  # "product", "quantized", "weight_only"
    must: float
    activation: str = "none"


CASES = (
    Case(8192, 8192, 8192, "product", 1.45),
    Case(4096, 4096, 4096, "product", 1.35),
    Case(8192, 14336, 4096, "quantized", 1.35, "silu"),
    Case(2048, 4096, 8192, "product", 1.35),
    Case(512, 4096, 4096, "quantized", 1.2),
    Case(128, 12288, 4096, "quantized", 1.3),
    Case(64, 12288, 4096, "quantized", 1.4),
    Case(16, 12288, 4096, "quantized", 1.4),
    Case(1, 16384, 16384, "weight_only", 1.6),
    Case(1, 4096, 4096, "weight_only", 1.2),
    *(Case(m, 4096, 4096, "quantized", 0.95) for m in (17, 33, 65, 100, 256)),
)
INT_MM = 32  # torch._int_mm takes more rows than 16
FUSED = (1024, 4096, 1.15)  # at least so many rows, at most so large a K: the bar of fusing
BATCHES = ((64, 1024, 1024, 128, 1.1), (32, 2048, 2048, 128, 1.1))  # batch, m, n, k, must
QUANTIZE = (8192, 4096, 0.7)  # m, k, share of the speed of copying


def ratios(session: Session) -> Iterator[Row]:
    for case in CASES[:3] if session.dry else CASES:
        yield from _timed(session, case, *(session.size(s) for s in (case.m, case.n, case.k)))
    yield _quantize(session)
    for *sizes, must in BATCHES[:1] if session.dry else BATCHES:
        batch, m, n, k = (session.size(int(s)) for s in sizes)
        a, b = (session.random(batch, rows, k) for rows in (m, n))
        how = ([1], 8, False, 8, torch.bfloat16)
        ways: dict[str, Call] = {
            "bf16": partial(torch.matmul, a, b.mT),
            "int8_bmm_dynamic": partial(OPS.int8_bmm_dynamic, a, b, *how),
        }
        us = {way: session.seconds(call) * 1e6 for way, call in ways.items()}
        ratio = us["bf16"] / us["int8_bmm_dynamic"]
        row = {"what": f"{batch}*{m}x{n}x{k}", "judged": "int8_bmm_dynamic", "must": must}
        yield {**row, "ratio": ratio, "us": us}


def _timed(session: Session, case: Case, m: int, n: int, k: int) -> Iterator[Row]:
    bias = case.activation != "none"
    linears = copies(session, m, k, n, bias=bias)
    after: Callable[[Tensor], Tensor] = F.silu if bias else (lambda y: y)
    ways: dict[str, list[Call]] = {
        "bf16": [lambda linear=linear: after(linear.in_float()) for linear in linears],  # type: ignore
        "product": calls(linears, "product", case.activation),
        "quantized": calls(linears, "dynamic", case.activation),
        "weight_only": calls(linears, "weight_only"),
    }
    if m >= INT_MM:
        ways |= _int_mm(session, linears)
    with forced(nearest(session, m, k, n)):
        found = {way: session.seconds(*of) for way, of in ways.items()}
    gain = found["bf16"] / found[case.judged]
    us = {way: round(s * 1e6, 2) for way, s in found.items()}
    row = {"what": f"{m}x{n}x{k}", "judged": case.judged, "ratio": gain, "must": case.must}
    speed = n * k / found[case.judged] / 1e12  # of reading the weight
    yield {**row, "TOPS": 2 * m * n * k / found["product"] / 1e12, "TB/s": speed, "us": us}
    rows, largest_k, must = FUSED
    if case.m >= rows and case.k <= largest_k:
        fused = found["_int_mm_dequantized"] / found["product"]
        yield {"what": row["what"], "judged": "fused, by _int_mm", "ratio": fused, "must": must}


def _int_mm(session: Session, linears: list[Linear]) -> dict[str, list[Call]]:
    """Returns calls of torch._int_mm, alone and with a dequantization compiled by Inductor."""
    torch._dynamo.reset()

    @torch.compile(backend="eager" if session.dry else "inductor")
    def dequantized(sums: Tensor, scale: Tensor, w_scale: Tensor) -> Tensor:
        return (sums.float() * (scale * w_scale)).bfloat16()

    alone, both = list[Call](), list[Call]()
    for linear in linears:
        q, scale, _ = linear.codes
        w_scale = OPS.weight_scale(linear.weight, len(linear.w))
        product = partial(torch._int_mm, q, OPS.quantize(linear.w, list(Code()))[0].T)
        alone.append(product)
        both.append(lambda p=product, s=scale, w=w_scale: dequantized(p(), s, w))  # type: ignore
    return {"_int_mm": alone, "_int_mm_dequantized": both}


def _quantize(session: Session) -> Row:
    """Measures the bytes read and written per second, as a fraction of those of copying."""
    m, k, must = QUANTIZE
    x = session.random(session.size(m), session.size(k))
    codes = {"quantize": Code(symmetric=0), "rotated": Code(symmetric=0, rotation=64)}
    us = {w: session.seconds(partial(OPS.quantize, x, list(c))) * 1e6 for w, c in codes.items()}
    copied = [row["TB/s"] for row in session.of("ceilings") if row.get("what") == "copy"]
    speed = 3 * x.numel() / us["quantize"] / 1e6
    share = speed / copied[0] if copied else 0.0
    row = {"what": f"quantize {len(x)}x{x.shape[1]}", "judged": "share of copying"}
    return {**row, "ratio": share, "must": must, "TB/s": speed, "us": us}
