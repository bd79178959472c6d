"""quantize_stochastic: reference, fake, gradient. Equation (Q7) of docs/numerics.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qfx.ops.quantize import code_range, quantize
from qfx.ops.registry import FAKES, fake, no_gradient, reference
from qfx.ops.rotation import rotate

ROUNDS = 7
_WORD = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: Sequence[Tensor], rounds: int = ROUNDS) -> list[Tensor]:
    """Philox-4x32: four words of a counter, two of a key -> four random words, all int64 [...].

    After Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    c0, c1, c2, c3 = counter
    for r in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # modulo 2^64: all bits of the product
        key0, key1 = key[0] + r * 0x9E3779B9, key[1] + r * 0xBB67AE85
        c0, c1 = (p1 >> 32 ^ c1 ^ key0) & _WORD, p1 & _WORD
        c2, c3 = (p0 >> 32 ^ c3 ^ key1) & _WORD, p0 & _WORD
    return [c0, c1, c2, c3]


def random_bits(seed: Tensor, count: int) -> Tensor:
    """16 random bits for each of the elements 0..count-1: int64 [count]. (Q7)"""
    groups = -(-count // 64)
    block = torch.arange(8 * groups, dtype=torch.int64, device=seed.device)
    zero, key = torch.zeros_like(block), seed.reshape(())
    words = torch.stack(philox((block & _WORD, block >> 32, zero, zero), (key, key >> 32)), 1)
    halves = torch.stack([words & 0xFFFF, words >> 16], 2)
    return halves.reshape(groups, 8, 2, 4).transpose(1, 2).reshape(-1)[:count]


@reference
def quantize_stochastic(
    x: Tensor, seed: Tensor, axes: Sequence[int], bits: int, factor: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] -> symmetric codes q int8 [..., K], scale float32, zero_point int32, all 0. (Q7)

    `seed` int64, one element; `factor` float32 [K], of (R1). The codes depend on nothing but the
    arguments' values.
    """
    qmin, qmax = code_range(bits, True)
    _, scale, zero_point = quantize(x, axes, bits, True, factor)
    u = (random_bits(seed, x.numel()).float() * 2**-16 + 2**-17).reshape(x.shape)
    q = (rotate(x.float(), factor, 0) * (1 / scale) + u).floor().clamp(qmin, qmax)
    return torch.where(scale.isfinite(), q, 0).to(torch.int8), scale, zero_point


@fake("quantize_stochastic")
def _(
    x: Tensor, seed: Tensor, axes: Sequence[int], bits: int, factor: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return FAKES["quantize"](x, axes, bits, True, factor)


no_gradient("quantize_stochastic")
