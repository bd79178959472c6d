"""Ceilings: the highest speeds that this GPU reaches, of which other stages' figures are
fractions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.clock import seconds
from benchmarks.gpu.correctness import right
from benchmarks.gpu.kernels import choices, forced
from benchmarks.gpu.operands import OPS, Linear
from benchmarks.gpu.peak import peaks
from benchmarks.gpu.session import Row, Session
from qfx.ops.code import Code

SIZE = 8192
COPY_BYTES = 2**30


def ceilings(session: Session) -> Iterator[Row]:
    """Yields the speeds of copying, of the largest products of bfloat16, int8 and signs, and of
    Hopper's instructions."""
    size, device = session.size(SIZE), session.device
    source = torch.zeros(session.size(COPY_BYTES), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copied = seconds([partial(target.copy_, source)], device)
    yield {"what": "copy", "TB/s": 2 * len(source) / copied / 1e12}
    linear = Linear.random(session, size, size, size)
    yield _reached("bf16", size, seconds([linear.in_float], device))
    q, w_q = linear.codes[0], OPS.quantize(linear.w, list(Code()))[0]
    yield _reached("torch._int_mm", size, seconds([partial(torch._int_mm, q, w_q.T)], device))
    for kernel in choices(right(session, "s8"), size):
        yield _of(session, "int8", kernel, size, linear.product)
    signs = OPS.binary_pack(linear.w.float())
    x = linear.x.float()
    for kernel in choices(right(session, "b1"), size):
        yield _of(session, "b1", kernel, size, lambda: OPS.binary_mm(x, signs, size))
    yield from peaks(session)  # last: it may not compile


def _of(session: Session, what: str, kernel: str, size: int, call: Callable[[], object]) -> Row:
    with forced(kernel):
        return {**_reached(what, size, seconds([call], session.device)), "kernel": kernel}


def _reached(what: str, size: int, took: float) -> Row:
    return {"what": what, "size": size, "TOPS": 2 * size**3 / took / 1e12, "ms": took * 1e3}
