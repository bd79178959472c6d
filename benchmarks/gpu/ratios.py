"""Ratios of int8 to bfloat16 by shape, with and without the quantization of activations, and to
PyTorch's own int8 product. `must` is the bar of a shape: float seconds divided by int8 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.clock import Call, seconds
from benchmarks.gpu.kernels import forced
from benchmarks.gpu.operands import OPS, Linear, calls, copies
from benchmarks.gpu.session import Row, Session
from benchmarks.gpu.sweep import nearest
from qfx.ops.code import Code

LEAST_ROWS = 32  # torch._int_mm takes more than 16
FUSED = (1024, 4096, 1.15)  # at least so many rows, at most so large a K: the bar of fusing


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
BATCHES = ((64, 1024, 1024, 128, 1.1), (32, 2048, 2048, 128, 1.1))  # batch, m, n, k, must
QUANTIZE = (8192, 4096, 0.7)  # m, k, share of the speed of copying


def ratios(session: Session) -> Iterator[Row]:
    for case in CASES[:3] if session.dry else CASES:
        yield from _timed(session, case, *(session.size(s) for s in (case.m, case.n, case.k)))
    yield _quantize(session)
    for *sizes, must in BATCHES[:1] if session.dry else BATCHES:
        yield _batch(session, must, *(session.size(int(s)) for s in sizes))


def _timed(session: Session, case: Case, m: int, n: int, k: int) -> Iterator[Row]:
    bias = case.activation != "none"
    make = partial(Linear.random, session, m, k, n, torch.bfloat16, bias=bias)
    linears = copies(session, make)
    activation = F.silu if bias else (lambda y: y)
    ways: dict[str, list[Call]] = {
        "bf16": [partial(_float, linear, activation) for linear in linears],
        "product": calls(linears, "product", case.activation),
        "quantized": calls(linears, "dynamic", case.activation),
        "weight_only": calls(linears, "weight_only"),
    }
    if m >= LEAST_ROWS:
        ways |= _pytorch(session, linears)
    with forced(nearest(session, m, k, n)):
        found = {way: seconds(of, session.device) for way, of in ways.items()}
    gain = found["bf16"] / found[case.judged]
    us = {way: round(s * 1e6, 2) for way, s in found.items()}
    row = {"what": f"{m}x{n}x{k}", "judged": case.judged, "ratio": gain, "must": case.must}
    speed = n * k / found[case.judged] / 1e12  # of reading the weight
    yield {**row, "TOPS": 2 * m * n * k / found["product"] / 1e12, "TB/s": speed, "us": us}
    rows, largest_k, must = FUSED
    if case.m >= rows and case.k <= largest_k:
        fused = found["_int_mm_dequantized"] / found["product"]
        yield {"what": row["what"], "judged": "fused, by _int_mm", "ratio": fused, "must": must}


def _float(linear: Linear, activation: type | object) -> Tensor:
    return activation(linear.in_float())  # type: ignore[operator,no-any-return]


def _pytorch(session: Session, linears: list[Linear]) -> dict[str, list[Call]]:
    """Returns calls of torch._int_mm, alone and with a dequantization compiled by Inductor."""
    backend = "eager" if session.dry else "inductor"
    torch._dynamo.reset()

    @torch.compile(backend=backend)
    def dequantized(sums: Tensor, scale: Tensor, w_scale: Tensor) -> Tensor:
        return (sums.float() * (scale * w_scale)).bfloat16()

    def whole(q: Tensor, w: Tensor, scale: Tensor, w_scale: Tensor) -> Tensor:
        return dequantized(torch._int_mm(q, w), scale, w_scale)

    pairs = [(x.codes[0], OPS.quantize(x.w, list(Code()))[0].T) for x in linears]
    alone = [partial(torch._int_mm, *pair) for pair in pairs]
    scales = [(x.codes[1], x.scale) for x in linears]
    both = [partial(whole, *pair, *each) for pair, each in zip(pairs, scales, strict=True)]
    return {"_int_mm": alone, "_int_mm_dequantized": both}  # type: ignore[dict-item]


def _quantize(session: Session) -> Row:
    """Measures the bytes read and written per second, as a fraction of those of copying."""
    m, k, must = QUANTIZE
    x = session.random(session.size(m), session.size(k))
    took = seconds([lambda: OPS.quantize(x, list(Code(symmetric=0)))], session.device)
    code = list(Code(symmetric=0, rotation=64))
    rotated = seconds([lambda: OPS.quantize(x, code)], session.device)
    copied = [row["TB/s"] for row in session.of("ceilings") if row.get("what") == "copy"]
    speed = 3 * x.numel() / took / 1e12
    us = {"quantize": took * 1e6, "rotated": rotated * 1e6}
    share = speed / copied[0] if copied else 0.0
    row = {"what": f"quantize {len(x)}x{x.shape[1]}", "judged": "share of copying"}
    return {**row, "ratio": share, "must": must, "TB/s": speed, "us": us}


def _batch(session: Session, must: float, batch: int, m: int, n: int, k: int) -> Row:
    a, b = (session.random(batch, rows, k) for rows in (m, n))
    how = ([1], 8, False, 8, torch.bfloat16)
    in_float = seconds([lambda: a @ b.mT], session.device)
    took = seconds([lambda: OPS.int8_bmm_dynamic(a, b, *how)], session.device)
    us = {"bf16": in_float * 1e6, "int8_bmm_dynamic": took * 1e6}
    row = {"what": f"{batch}*{m}x{n}x{k}", "judged": "int8_bmm_dynamic"}
    return {**row, "ratio": in_float / took, "must": must, "us": us}
