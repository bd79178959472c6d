"""Random bits that depend only on a seed and a position, used to round codes. (Q7)"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 7
_WORD = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: Sequence[Tensor], rounds: int = ROUNDS) -> list[Tensor]:
    """Computes Philox-4x32: four words of a counter, two of a key -> four random words, all int64
    [...].

    Source: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    c0, c1, c2, c3 = counter
    for r in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # modulo 2^64: all bits of the product
        key0, key1 = key[0] + r * 0x9E3779B9, key[1] + r * 0xBB67AE85
        c0, c1 = (p1 >> 32 ^ c1 ^ key0) & _WORD, p1 & _WORD
        c2, c3 = (p0 >> 32 ^ c3 ^ key1) & _WORD, p0 & _WORD
    return [c0, c1, c2, c3]


def random_bits(seed: Tensor, count: int) -> Tensor:
    """Returns 16 random bits for each of the elements 0..count-1: int64 [count]. (Q7)"""
    groups = -(-count // 64)
    block = torch.arange(8 * groups, dtype=torch.int64, device=seed.device)
    zero, key = torch.zeros_like(block), seed.reshape(())
    words = torch.stack(philox((block & _WORD, block >> 32, zero, zero), (key, key >> 32)), 1)
    halves = torch.stack([words & 0xFFFF, words >> 16], 2)
    return halves.reshape(groups, 8, 2, 4).transpose(1, 2).reshape(-1)[:count]
