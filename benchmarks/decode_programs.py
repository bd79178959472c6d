"""A language model of transformers compiled to programs by `qfx.compile_for_generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.decode_static import Case
from qfx.generate import compile_for_generate
from qfx.nn.stored_modules import stored_linears
from qfx.programs.streaming import TRIALS


class Programs:
    """A decoder by programs. `key_bits`, `value_bits`: bits of the cache."""

    def __init__(
        self, scheme: str, case: Case, model: Any, key_bits: int = 8, value_bits: int = 8
    ) -> None:
        self.model = compile_for_generate(
            model,
            scheme,
            max_length=case.length,
            batch_sizes=(case.batch,),
            key_bits=key_bits,
            value_bits=value_bits,
        )
        self.cache: Any = None
        read = {t.data_ptr(): t.nbytes for _, m in stored_linears(self.model) for t in m.buffers()}
        self.weights = sum(read.values())  # bytes
        self.cache_bytes = _bytes_of_token(self.model.forward)
        for _ in range(-(-TRIALS // case.new)):
            self.generate(torch.zeros(case.batch, 1, dtype=torch.int64), case.new + 1)

    def prefill(self, tokens: Tensor) -> Tensor:
        from transformers.cache_utils import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        return self._call(tokens)

    def prepare(self) -> None:
        pass

    def step(self, token: Tensor) -> Tensor:
        return self._call(token)

    def generate(self, tokens: Tensor, new: int, **more: Any) -> Tensor:
        """Generates greedily, in a new conversation, and returns sequences [B, L + new]."""
        return self.model.generate(  # type: ignore[no-any-return]
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            eos_token_id=self.model.config.vocab_size,  # which no text ends with
            do_sample=False,
            pad_token_id=0,
            **more,
        )

    def _call(self, tokens: Tensor) -> Tensor:
        found = self.model(
            input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return found.logits[:, -1]  # type: ignore[no-any-return]


def _bytes_of_token(steps: Any) -> int:
    """Returns the bytes of keys and values of one token of one sequence, in all layers, with their
    scales."""
    found = 0
    for heads, d in steps.shapes:
        found += heads * sum(d * bits // 8 + (4 if bits == 8 else 8) for bits in steps.bits)
    return found
