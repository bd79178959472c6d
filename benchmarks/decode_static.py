"""A language model of transformers that decodes with a static cache, one call per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One measurement: `batch` sequences of `context` tokens, and `new` tokens decoded after
    them."""

    folder: Path  # of the float32 model
    batch: int
    context: int
    new: int
    inner: str = "inductor"  # what compiles: tests take less

    @property
    def length(self) -> int:
        """The tokens that a cache must hold: generation gets the first new token from the
        prefill."""
        return self.context + self.new + 1


class Decoder(Protocol):
    """The interface of a way to decode. `generate` exists if the library has such a call."""

    def prefill(self, tokens: Tensor) -> Tensor:
        """Reads tokens [B, L] of new sequences and returns logits [B, V] of the next token."""

    def prepare(self) -> None:
        """Does what a step needs but is not part of its time."""

    def step(self, token: Tensor) -> Tensor:
        """Reads one token [B, 1] after all before and returns logits [B, V]."""


def own(tokens: Tensor) -> Tensor:
    """Returns a copy with the default strides of its shape: Dynamo compiles again for other
    strides, even if a dimension of one element makes them meaningless."""
    return tokens.clone(memory_format=torch.contiguous_format)


MakeCache = Callable[[Any, int, int], Any]  # of a configuration, texts and tokens of each


def static_cache(config: Any, batch: int, length: int) -> Any:
    from transformers.cache_utils import StaticCache

    cache = StaticCache(config=config, max_cache_len=length)
    shape = config.num_key_value_heads, config.head_dim
    cache.early_initialization(batch, *shape, config.dtype or torch.float32, torch.device("cpu"))
    return cache


def as_it_is(forward: Any) -> Any:
    return forward


class Static:
    """A model of transformers with a `forward` compiled by `compile` and a cache made by `cache`.
    `step` passes the same arguments as `generate`, so both run the same graphs."""

    outside = "python"  # what a step does beside operators

    def __init__(
        self,
        case: Case,
        model: Any,
        compile: Callable[[Any], Any] = as_it_is,
        cache: MakeCache = static_cache,
    ) -> None:
        self.model, self.batch = model, case.batch
        self.cache = cache(model.config, case.batch, case.length)
        self.told = 0
        model.forward = compile(model.forward)

    def prefill(self, tokens: Tensor) -> Tensor:
        self.cache.reset()
        self.told = 0
        self._look(tokens.shape[1])
        return self._call(tokens)

    def prepare(self) -> None:
        self._look(1)

    def step(self, token: Tensor) -> Tensor:
        return self._call(token)

    def generate(self, tokens: Tensor, new: int, **more: Any) -> Tensor:
        """Generates greedily, in a new conversation, and returns sequences [B, L + new]."""
        self.cache.reset()
        return self.model.generate(  # type: ignore[no-any-return]
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=self.cache,
            max_new_tokens=new,
            eos_token_id=self.model.config.vocab_size,  # which no text ends with
            do_sample=False,
            pad_token_id=0,
            **more,
        )

    def _look(self, new: int) -> None:
        """Prepares the places and masks of `new` tokens, which `generate` also makes outside of the
        model."""
        from transformers.masking_utils import create_masks_for_generate

        told = self.told + new
        self.places = torch.arange(self.told, told).repeat(self.batch, 1)
        masks = create_masks_for_generate(
            config=self.model.config,
            inputs_embeds=torch.empty(self.batch, new, 0, dtype=self.model.dtype),
            attention_mask=torch.ones(self.batch, told, dtype=torch.int64),
            past_key_values=self.cache,
            position_ids=self.places,
        )
        self.masks, self.told = _laid_out(masks), told

    def _call(self, tokens: Tensor) -> Tensor:
        found = self.model(
            input_ids=tokens,
            past_key_values=self.cache,
            position_ids=self.places,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
            **({} if self.masks is None else {"attention_mask": self.masks}),
        )
        return found.logits[:, -1]  # type: ignore[no-any-return]


def _laid_out(masks: Any) -> Any:
    """Returns masks in the form that `generate` passes: one, one for each kind of layer, or None if
    all is seen."""
    if isinstance(masks, dict):
        return {kind: _laid_out(mask) for kind, mask in masks.items()}
    return None if masks is None else masks.contiguous()


def load(case: Case) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32).eval()


class Counted:
    """A streamer of `generate` that calls `after` with the number of new tokens after each
    token."""

    def __init__(self, after: Callable[[int], None]) -> None:
        self.after, self.count = after, -1  # the first that it is given is the prompt

    def put(self, _: Tensor) -> None:
        self.count += 1
        if self.count:
            self.after(self.count)

    def end(self) -> None:
        pass
