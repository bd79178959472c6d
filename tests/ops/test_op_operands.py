"""Operands that share memory with what is written, and operands of more elements than there is
memory: refused before anything is written or copied."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from qfx.ops.kv_cache import kv_empty
from tests.conftest import same_bits
from tests.cuda import emulator as cuda_emulator
from tests.lib.aliased import written
from tests.lib.rows import BUILDERS, WRITTEN

OPS = torch.ops.qfx


def _run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"tests.lib.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-500:]}{done.stderr[-2000:]}"
    return done.stdout


def test_what_is_read_may_lie_in_what_is_written() -> None:
    returned, refused = map(int, re.findall(r"\d+", _run("aliased", "4", "1")))
    assert [name for name in BUILDERS if written(name)] == [*WRITTEN]
    assert returned > 100 and refused > 50


@pytest.mark.parametrize("library", ["qfx", "qfx_emulated"])
def test_operands_are_checked_before_they_are_copied(library: str) -> None:
    """Copied first, an expanded operand would take as much memory as it has elements."""
    if library == "qfx_emulated":
        cuda_emulator.build()
    *faults, summary = _run("stretched", library, "0.05", "1").splitlines()
    assert faults == []
    calls, megabytes = map(int, re.findall(r"\d+", summary))
    assert calls > 4000 and megabytes < 200


def _tokens(batch: int, heads: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(count)
    k, v = (torch.randn(batch, heads, count, 16, generator=g) for _ in range(2))
    return k, v, torch.randperm(32, generator=g)[:count]


def test_heads_of_keys_and_values_may_alternate_in_one_memory() -> None:
    keys, key_scale, values, value_scale = kv_empty(2, 3, 32, 16)
    codes = torch.zeros(2, 3, 2, 32 * 16, dtype=torch.int8)
    scales = torch.zeros(3, 2, 2, 32, 1).transpose(0, 1)
    beside = (
        codes[:, :, 0].view(keys.shape),
        scales[:, :, 0],
        codes[:, :, 1].view(values.shape),
        scales[:, :, 1],
    )
    apart = (keys, key_scale, values, value_scale)
    OPS.kv_write(*apart, *_tokens(2, 3, 20))
    OPS.kv_write(*beside, *_tokens(2, 3, 20))
    assert all(same_bits(a, b) for a, b in zip(apart, beside, strict=True))


@pytest.mark.parametrize(("first", "step"), [(240, 1024), (776, 1000)])
def test_pages_of_keys_and_values_that_overlap_are_refused(first: int, step: int) -> None:
    """In each page, or with the page before; those of one memory that do not are written."""
    memory = torch.zeros(8 * 1024, dtype=torch.int8)
    scales = torch.zeros(4, 1, 2, 16, 1)

    def cache(at: int, page: int) -> tuple[Tensor, ...]:
        keys = memory.as_strided((4, 1, 1, 16, 16), (page, page, 256, 16, 1))
        values = memory.as_strided((4, 1, 16, 16), (page, page, 16, 1), at)
        return keys, scales[:, :, 0], values, scales[:, :, 1]

    token = torch.ones(1, 1, 16)
    OPS.kv_write_pages(*cache(256, 1024), token, token, torch.tensor([17]))
    with pytest.raises(RuntimeError, match="keys and values are both to be written, but share"):
        OPS.kv_write_pages(*cache(first, step), token, token, torch.tensor([17]))


def test_a_cache_of_one_head_more_than_its_memory_has_is_refused() -> None:
    cache = kv_empty(1, 3, 32, 16)
    size = cache[2].stride(1)
    overlapping = cache[2].as_strided((2, 2, 32, 16), (size, size, 16, 1))
    expected = "kv_write: values is to be written, but elements of its shape 2x2x32x16 share memory"
    whole = kv_empty(2, 2, 32, 16)
    with pytest.raises(RuntimeError, match=expected):
        OPS.kv_write(*whole[:2], overlapping, whole[3], *_tokens(2, 2, 5))


@pytest.mark.parametrize("expanded", range(4))
def test_the_fake_refuses_an_expanded_cache_too(expanded: int) -> None:
    cache = list(kv_empty(2, 3, 32, 16))
    cache[expanded] = cache[expanded][:1].expand_as(cache[expanded])
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="share memory; pass a clone"):
        OPS.kv_write(*map(mode.from_tensor, (*cache, *_tokens(2, 3, 5))))


def test_attention_append_refuses_batch_axes_that_differ_by_their_order() -> None:
    """They have as many matrices, but those that broadcast to each other are four."""
    q = torch.randn(2, 2, 3, 8)
    past_k, k = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 1, 8)
    past_v, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 1, 8)
    with pytest.raises(RuntimeError, match="past_k has shape 2x1x4x8 but past_v 1x2x4x8"):
        OPS.attention_append(q, past_k, k, past_v, v, None, 1.0, False, torch.float32)
