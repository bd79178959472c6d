"""The attention of vLLM to int8 and int4 caches, with the classes of fake_attention.py in the place
of vLLM's: the same bits as operators on a cache of each text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qfx.io.errors import UserError
from qfx.ops.kv_cache import kv_empty
from qfx.ops.kv_pages import visible
from qfx.vllm.plugin import register
from tests.conftest import same_bits
from tests.vllm import fake_attention
from tests.vllm import fake_vllm as fake

HEADS, GROUP, D, SCALE = 2, 3, 64, 0.125
NAMES = {8: "int8_per_token_head", 4: "int4_per_token_head"}
OPS = torch.ops.qfx


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns the module of caches; in vLLM 0.32.0, or of the version that a test gives."""
    version = getattr(request, "param", "0.32.0")
    with fake.installed():
        module = import_module("qfx.vllm.quantization")
        monkeypatch.setattr(module, "_version_of", lambda name: version)
        register()
        yield import_module("qfx.vllm.cache")


def _spec(name: str) -> fake_attention.AttentionSpec:
    return fake_attention.AttentionSpec(HEADS, D, SimpleNamespace(name=name.upper()))


def test_the_cpu_attention_of_vllm_is_ours(cache: Any) -> None:
    assert fake_attention.BACKENDS == {"CPU_ATTN": "qfx.vllm.cache.CacheBackend"}
    assert {*NAMES.values(), "auto", "fp8"} == {*cache.CacheBackend.supported_kv_cache_dtypes}


@pytest.mark.parametrize("cache", ["0.33.0", ""], indirect=True)
def test_another_vllm_keeps_its_attention(cache: Any) -> None:
    assert fake_attention.BACKENDS == {}


@pytest.mark.parametrize(("name", "content"), [(NAMES[8], 136), (NAMES[4], 80), ("none", None)])
def test_bytes_of_a_token_and_head(cache: Any, name: str, content: int | None) -> None:
    """Codes of a key and a value, with a scale each, and a minimum each with 4 bits."""
    assert cache.CacheBackend.customize_spec(_spec(name)).state_content_bytes == content


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("window", "softcap"), [(-1, 0.0), (5, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_in_pages(
    cache: Any, bits: int, window: int, softcap: float, dtype: torch.dtype
) -> None:
    """A text that is read in two steps, beside another one in the second."""
    g = torch.Generator().manual_seed(0)
    spec = cache.CacheBackend.customize_spec(_spec(NAMES[bits]))
    kv_cache = spec.allocate(6, torch.int8 if bits == 8 else torch.uint8)
    how = {"sliding_window": window, "logits_soft_cap": softcap}
    layer = cache.CacheBackend.get_impl_cls()(SCALE, NAMES[bits], D, **how)
    builder = cache.CacheBackend.get_builder_cls()(spec, [], None, "cpu")
    texts = [[5, 0], [2, 4]]  # pages
    k, v = (torch.randn(2, 50, HEADS, D, generator=g).to(dtype) for _ in range(2))
    q = torch.randn(2, 50, HEADS * GROUP, D, generator=g).to(dtype)
    for steps in ([(0, 0, 33)], [(0, 33, 34), (1, 0, 50)]):
        counts = torch.tensor([0] + [end - begin for _, begin, end in steps])
        slots = [
            texts[s][t // 32] * 32 + t % 32 for s, begin, end in steps for t in range(begin, end)
        ]
        given = SimpleNamespace(
            num_actual_tokens=len(slots),
            max_query_len=None,
            query_start_loc=counts.cumsum(0).int(),
            max_seq_len=None,
            seq_lens=torch.tensor([end for _, _, end in steps]).int(),
            block_table_tensor=torch.tensor([texts[s] for s, _, _ in steps]).int(),
            slot_mapping=torch.tensor(slots),
            causal=True,
        )
        metadata = builder.build(0, given)
        new = [torch.cat([t[s, begin:end] for s, begin, end in steps]) for t in (q, k, v)]
        padded = [torch.cat([t, t[:1]]) for t in new]
        layer.do_kv_cache_update(None, *padded[1:], kv_cache, metadata.slot_mapping)
        y = torch.full_like(padded[0], 9)
        layer.forward(None, *padded, kv_cache, metadata, y)
        expected = [
            _alone(q[s, begin:end], k[s, :end], v[s, :end], bits, max(window, 0), softcap)
            for s, begin, end in steps
        ]
        assert same_bits(y[:-1], torch.cat(expected)) and (y[-1] == 9).all()


def _alone(q: Tensor, k: Tensor, v: Tensor, bits: int, window: int, softcap: float) -> Tensor:
    length = len(k)
    whole = kv_empty(1, HEADS, length, D, bits, bits)
    queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k, v))
    OPS.kv_write(*whole, keys, values, torch.arange(length))
    mask = visible(len(q), length, window)
    y: Tensor = OPS.kv_attention(queries, *whole, mask, SCALE, length, q.dtype, None, softcap)
    return y[0].transpose(0, 1)


def test_other_dtypes_are_served_by_vllm(cache: Any) -> None:
    layer = cache.CacheAttention(SCALE, "auto", D)
    memory = torch.zeros(3)
    layer.do_kv_cache_update(None, memory, memory, memory, None)
    assert layer.forward(*[memory] * 7) == "vLLM's" and (memory == 7).all()
    assert cache.CacheMetadataBuilder(_spec("none"), [], None, "cpu").build(0, None) == "vLLM's"


def test_before_there_is_a_step_outputs_are_left(cache: Any) -> None:
    layer = cache.CacheAttention(SCALE, NAMES[8], D)
    assert layer.forward(*[None] * 5, None, torch.ones(3)) == "vLLM's"


REFUSED = {
    "encoder": ({"attn_type": "encoder"}, "attention of type encoder"),
    "sinks": ({"sinks": torch.ones(3)}, "attention sinks"),
    "alibi": ({"alibi_slopes": torch.ones(3)}, "ALiBi"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_said(cache: Any, name: str) -> None:
    given, what = REFUSED[name]
    with pytest.raises(UserError, match=f"a cache of int8_per_token_head is not built for {what}"):
        cache.CacheAttention(SCALE, NAMES[8], D, **given)
    cache.CacheAttention(SCALE, "auto", D, **given)


@pytest.mark.parametrize("causal", [False, torch.tensor([True])])
def test_masks_that_are_not_causal(cache: Any, causal: Any) -> None:
    layer = cache.CacheAttention(SCALE, NAMES[8], D)
    with pytest.raises(UserError, match="not built for masks that are not causal"):
        layer.forward(*[None] * 5, SimpleNamespace(causal=causal), torch.ones(3))
