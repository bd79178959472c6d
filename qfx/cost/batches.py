"""Times batches of matmuls of two activations and attentions, and predicts the time of a batch of
any number of matrices from the time of a batch of BATCH."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.cost.grid_timing import FAR, ROUNDS, random
from qfx.cost.model import Estimate, Work
from qfx.cost.table import Times
from qfx.cost.timing import fastest

PRODUCT_AXES = ((1, 8, 64, 256), (32, 64, 128, 512), (32, 64, 128, 512))  # M, K, N of each matrix
ATTENTION_AXES = ((1, 16, 128, 512), (32, 64, 128), (16, 128, 512))
DECODE_AXES = ((1, 2), (32, 64, 128), (16, 128, 512))  # decoding has one query
BATCH = 8  # matrices of a measured batch
Cell = Callable[[int, int, int, int, torch.dtype], list[float]]  # seconds of a batch of M, K, N


def per_matrix(table: Times, work: Work) -> Estimate:
    """Predicts the seconds of a batch: a fixed time for the call, and the same time for each
    matrix."""

    def seconds(name: str, call: float) -> float:
        grid = table.grids[name]
        whole = max(grid.logs(*grid.within(work.m, work.k, work.n)), grid.smallest)
        return call + max(whole - call, 0.0) * work.batch / BATCH

    float_call, int8_call = table.numbers["call"]
    return Estimate(seconds("float", float_call), seconds("int8", int8_call))


def product(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[float]:
    """Returns seconds of a batch of matmuls [m, k] x [k, n] of two activations, in float and in
    int8. As in attention, the elements of b are contiguous along the shorter of K and N."""
    a = random(batch * m, k, dtype).reshape(batch, m, k)
    b = random(batch * n, k, dtype).reshape(batch, n, k)
    b = b if k <= n else b.mT.contiguous().mT
    return fastest(
        lambda: torch.matmul(a, b.mT),
        lambda: torch.ops.qfx.int8_bmm_dynamic(a, b, [1], 8, False, 8, dtype),
        rounds=ROUNDS,
    )


def attention(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[float]:
    q, keys, values = _heads(batch, m, k, n, dtype)
    return fastest(
        lambda: F.scaled_dot_product_attention(q, keys, values),
        lambda: torch.ops.qfx.int8_attention(q, keys, values, None, k**-0.5, False, dtype),
        rounds=ROUNDS,
    )


def attention_step(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[float]:
    """Returns seconds of an attention and its gradients."""
    with torch.inference_mode(False), torch.enable_grad():
        heads = [t.clone().requires_grad_() for t in _heads(batch, m, k, n, dtype)]
        grad = _heads(batch, m, k, n, dtype)[0].clone()
        q, keys, values = heads

        def step(attended: Callable[[], Tensor]) -> Callable[[], object]:
            return lambda: torch.autograd.grad(attended(), heads, grad)

        return fastest(
            step(lambda: F.scaled_dot_product_attention(q, keys, values)),
            step(
                lambda: torch.ops.qfx.int8_attention(q, keys, values, None, k**-0.5, False, dtype)
            ),
            rounds=ROUNDS,
        )


def decode(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[float]:
    """Returns seconds of decoding attention (one query) in PyTorch and in `attention_decode`. Keys
    and values come from memory and not from caches, because a model reads all of its weights
    between two tokens."""
    q, keys, values = _heads(batch, m, k, n, dtype)
    pairs = FAR // max(2 * keys.numel() * keys.element_size(), FAR // 1024)
    apart = torch.contiguous_format  # the layout in which cat leaves a cache
    past = itertools.cycle(
        [(keys.clone(memory_format=apart), values.clone(memory_format=apart)) for _ in range(pairs)]
    )
    return fastest(
        lambda: F.scaled_dot_product_attention(q, *next(past)),
        lambda: torch.ops.qfx.attention_decode(q, *next(past), None, k**-0.5, False, dtype),
        rounds=ROUNDS,
    )


def _heads(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns random q [1, batch, m, k], keys and values [1, batch, n, k] in the layout of models:
    `batch` heads were split off the features of a token, so the heads of a token are adjacent in
    memory."""
    return [
        random(rows, batch * k, dtype).reshape(1, rows, batch, k).transpose(1, 2)
        for rows in (m, n, n)
    ]
