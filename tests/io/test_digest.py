"""Digests of tensors: of the values in order, however they lie in memory."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from qfx.io.digest import digest_of


def plain(values: Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


VALUES: dict[str, Tensor] = {
    "a number": torch.tensor(1.5),
    "none": torch.empty(0, 3),
    "none of rows": torch.empty(3, 0),
    "transposed": torch.arange(35.0).view(5, 7).t(),
    "halves": torch.randn(3, 2, 5, dtype=torch.bfloat16),
    "booleans": torch.tensor([True, False, True]),
    "more than are read at once": torch.arange(2**20 + 7, dtype=torch.int32),
    "long rows": torch.arange(2 * (2**20 + 1), dtype=torch.int32).view(2, -1),
    "expanded": torch.arange(3).expand(4, 3),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_digest_is_of_the_values_in_order(name: str) -> None:
    values = VALUES[name]
    wanted = hashlib.sha256(b"head" + plain(values) + b"\0" + plain(values)).hexdigest()
    assert digest_of("head", values, "\0", values) == wanted
    wide = hashlib.sha256(plain(values.double())).hexdigest()
    assert digest_of(values, dtype=torch.float64) == wide


def test_a_digest_is_of_the_values_that_lazy_bits_give() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert digest_of(values.conj()) == digest_of(values.conj().resolve_conj()) != digest_of(values)
