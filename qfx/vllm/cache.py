"""CacheBackend: the CPU attention of vLLM, and attention to int8 or int4 keys and values where that
is the dtype of its cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from qfx.io.errors import UserError
from qfx.ops.kv_blocks import TOKENS

BITS = {"int8_per_token_head": 8, "int4_per_token_head": 4}  # names of vLLM
SCALE_BYTES = {8: 4, 4: 8}  # of a key or of a value: a scale, with 4 bits a minimum too


class CacheBackend(CPUAttentionBackend):  # type: ignore[misc]  # untyped without vLLM
    """Serves `--kv-cache-dtype int8_per_token_head` and `int4_per_token_head`, which vLLM has for
    GPUs alone, by `qfx::kv_attention_pages`; other dtypes as the class of vLLM does."""

    supported_kv_cache_dtypes = (*CPUAttentionBackend.supported_kv_cache_dtypes, *BITS)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        bits = _bits_of(spec)
        if bits is None or spec.state_content_bytes is not None:
            return spec
        codes = (spec.head_size + spec.head_size_v) * bits // 8
        return dataclasses.replace(spec, state_content_bytes=codes + 2 * SCALE_BYTES[bits])

    @staticmethod
    def get_impl_cls() -> type:
        return CacheAttention

    @staticmethod
    def get_builder_cls() -> type:
        return CacheMetadataBuilder


def _bits_of(spec: Any) -> int | None:
    """Returns the bits of a cache's codes, or None if vLLM's code serves it."""
    return BITS.get(spec.kv_quant_mode.name.lower())


class CacheMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Says where the texts of a step lie, without the plan that vLLM's kernels need."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.own = _bits_of(kv_cache_spec) is not None
        given = (kv_cache_spec, layer_names, vllm_config, device)
        if self.own:
            AttentionMetadataBuilder.__init__(self, *given)
        else:
            super().__init__(*given)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        if not self.own:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        given = common_attn_metadata
        return CPUAttentionMetadata(
            num_actual_tokens=given.num_actual_tokens,
            max_query_len=given.max_query_len,
            query_start_loc=given.query_start_loc,
            max_seq_len=given.max_seq_len,
            seq_lens=given.seq_lens,
            block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
            scheduler_metadata=None,
            causal=given.causal,
        )


class CacheAttention(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer. With codes it raises UserError for what they are not built for:
    encoders, attention sinks, ALiBi, and masks that are not causal."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.bits = BITS.get(self.kv_cache_dtype)
        self.found: tuple[Tensor | None, tuple[Tensor, ...]] = (None, ())  # of which cache
        if self.bits is None:
            return
        for refused, what in (
            (self.attn_type != AttentionType.DECODER, f"attention of type {self.attn_type}"),
            (self.sinks is not None, "attention sinks"),
            (self.alibi_slopes is not None, "ALiBi"),
        ):
            if refused:
                raise UserError(
                    f"qfx in vLLM: a cache of {self.kv_cache_dtype} is not built for {what}: "
                    "leave --kv-cache-dtype out"
                )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *given: Any,
        **named: Any,
    ) -> Tensor:
        if self.bits is None or attn_metadata is None:
            operands = (layer, query, key, value, kv_cache, attn_metadata, output)
            return super().forward(*operands, *given, **named)  # type: ignore[no-any-return]
        at = attn_metadata
        if at.causal is not True:
            raise UserError(
                f"qfx in vLLM: a cache of {self.kv_cache_dtype} is not built for masks that are "
                "not causal: leave --kv-cache-dtype out"
            )
        count = at.num_actual_tokens
        output[:count] = torch.ops.qfx.kv_attention_pages(
            query[:count],
            *self.tensors_of(kv_cache),
            at.block_table,
            at.query_start_loc,
            at.seq_lens,
            self.scale,
            max(self.sliding_window, 0),
            output.dtype,
            self.logits_soft_cap,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.bits is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        count = len(slot_mapping)
        tokens = (key[:count], value[:count], slot_mapping)
        torch.ops.qfx.kv_write_pages(*self.tensors_of(kv_cache), *tokens)

    def tensors_of(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors of a cache of qfx in vLLM's [pages, heads, tokens, bytes], made once:
        the keys of each page and head in front of the values, their scales behind both."""
        if self.found[0] is not kv_cache:
            self.found = (kv_cache, cut(kv_cache, self.bits or 8, self.head_size))
        return self.found[1]


def cut(kv_cache: Tensor, bits: int, head_size: int) -> tuple[Tensor, ...]:
    """Returns keys, key_scale, values and value_scale as views of a cache [pages, heads, tokens,
    bytes]. `head_size`: features of a key; values take the bytes that are left."""
    pages, heads, tokens, width = kv_cache.shape
    of_scale = SCALE_BYTES[bits]
    of_key = head_size * bits // 8
    of_value = width - of_key - 2 * of_scale
    sizes = [tokens * size for size in (of_key, of_value, of_scale, of_scale)]
    keys, values, *scales = kv_cache.view(pages, heads, -1).split(sizes, -1)
    codes = torch.int8 if bits == 8 else torch.uint8
    keys, values = (t.view(codes) for t in (keys, values))
    key_scale, value_scale = (
        t.view(torch.float32).view(pages, heads, tokens, of_scale // 4) for t in scales
    )
    return (
        keys.view(pages, heads, tokens // TOKENS, of_key, TOKENS),
        key_scale,
        values.view(pages, heads, tokens, of_value),
        value_scale,
    )
