"""The classes of vLLM's CPU attention that qfx.vllm.cache extends, with what they do as far as it
depends on that."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """As vLLM's: the sizes of one layer's cache."""

    num_kv_heads: int
    head_size: int
    kv_quant_mode: Any
    block_size: int = 32
    state_content_bytes: int | None = None

    @property
    def head_size_v(self) -> int:
        return self.head_size

    def allocate(self, pages: int, dtype: torch.dtype) -> Tensor:
        """Returns a cache [pages, heads, tokens, bytes] as vLLM allocates it."""
        assert self.state_content_bytes is not None
        return torch.zeros(
            pages, self.num_kv_heads, self.block_size, self.state_content_bytes, dtype=dtype
        )


class CPUAttentionBackend:
    """As vLLM's."""

    supported_kv_cache_dtypes = ("auto", "fp8")


class AttentionMetadataBuilder:
    """As vLLM's."""

    def __init__(self, spec: Any, names: Any, config: Any, device: Any) -> None:
        self.kv_cache_spec = spec


class CPUAttentionMetadataBuilder(AttentionMetadataBuilder):
    """As vLLM's, which knows no int8."""

    def __init__(self, spec: Any, names: Any, config: Any, device: Any) -> None:
        assert "INT" not in spec.kv_quant_mode.name
        super().__init__(spec, names, config, device)

    def build(self, prefix: int, metadata: Any, fast_build: bool = False) -> str:
        return "vLLM's"


class CPUAttentionBackendImpl:
    """As vLLM's."""

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def __init__(
        self,
        scale: float,
        kv_cache_dtype: str,
        head_size: int,
        sliding_window: int = -1,
        logits_soft_cap: float = 0,
        **other: Any,
    ) -> None:
        self.scale, self.kv_cache_dtype, self.head_size = scale, kv_cache_dtype, head_size
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.attn_type = "decoder"
        vars(self).update(other)

    def forward(self, *given: Any) -> str:
        return "vLLM's"

    def do_kv_cache_update(self, layer: Any, k: Tensor, v: Tensor, cache: Tensor, at: Any) -> None:
        cache.fill_(7)


BACKENDS: dict[str, str] = {}
_V1 = "vllm.v1.attention"
CONTENTS: dict[str, dict[str, Any]] = {
    "vllm.v1": {},
    _V1: {},
    f"{_V1}.backend": {
        "AttentionMetadataBuilder": AttentionMetadataBuilder,
        "AttentionType": SimpleNamespace(DECODER="decoder"),
    },
    f"{_V1}.backends": {},
    f"{_V1}.backends.cpu_attn": {
        "CPUAttentionBackend": CPUAttentionBackend,
        "CPUAttentionBackendImpl": CPUAttentionBackendImpl,
        "CPUAttentionMetadata": SimpleNamespace,
        "CPUAttentionMetadataBuilder": CPUAttentionMetadataBuilder,
    },
    f"{_V1}.backends.registry": {
        "AttentionBackendEnum": SimpleNamespace(CPU_ATTN="CPU_ATTN"),
        "register_backend": BACKENDS.__setitem__,
    },
}
