"""The ways in which benchmarks/decode.py runs a language model of transformers: float, and qfx.

Each makes a `Decoder` of a float32 model; other libraries are in benchmarks/decode_peers.py. Ways
of PyTorch have a static cache, so that all of them read the same number of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import qfx
from qfx.generate import compile_for_generate
from qfx.nn.stored_modules import stored_linears
from qfx.ops.storage import stored_bytes
from qfx.programs.streaming import TRIALS
from qfx.values.config import PRESETS

BF16 = "bfloat16"


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
    """The interface of a way. `weights`: bytes of weights that a step reads. A way whose library
    generates by a call of its own has `generate(tokens, new)` too."""

    weights: int

    def prefill(self, tokens: Tensor) -> Tensor:
        """Reads tokens [B, L] of new sequences and returns logits [B, V] of the next token."""

    def prepare(self) -> None:
        """Does what a step needs but is not part of its time."""

    def step(self, token: Tensor) -> Tensor:
        """Reads one token [B, 1] after all before and returns logits [B, V]."""


def load(case: Case) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32).eval()


def own(tokens: Tensor) -> Tensor:
    """Returns a copy with the default strides of its shape: Dynamo compiles again for other
    strides, even if a dimension of one element makes them meaningless."""
    return tokens.clone(memory_format=torch.contiguous_format)


def generate(model: Any, tokens: Tensor, new: int, **more: Any) -> Tensor:
    """Generates greedily, `new` tokens whatever they are, and returns sequences [B, L + new]."""
    return model.generate(  # type: ignore[no-any-return]
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        eos_token_id=model.config.vocab_size,  # which no text ends with
        do_sample=False,
        pad_token_id=0,
        **more,
    )


class Static:
    """A model of transformers with a static cache, and a `forward` compiled by `compile`. A step
    passes the same arguments as `generate`, so both run the same graphs."""

    def __init__(self, case: Case, model: Any, compile: Callable[[Any], Any] | None = None) -> None:
        from transformers.cache_utils import StaticCache

        config = model.config
        self.model, self.batch, self.told, self.weights = model, case.batch, 0, linear_bytes(model)
        self.cache: Any = StaticCache(config=config, max_cache_len=case.length)
        shape = config.num_key_value_heads, config.head_dim
        self.cache.early_initialization(case.batch, *shape, model.dtype, torch.device("cpu"))
        if compile is not None:
            model.forward = compile(model.forward)

    def prefill(self, tokens: Tensor) -> Tensor:
        self.cache.reset()
        self.told = 0
        self._look(tokens.shape[1])
        return self.step(tokens)

    def prepare(self) -> None:
        self._look(1)

    def step(self, token: Tensor) -> Tensor:
        found = self.model(
            input_ids=token,
            past_key_values=self.cache,
            position_ids=self.places,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
            **({} if self.masks is None else {"attention_mask": self.masks}),
        )
        return found.logits[:, -1]  # type: ignore[no-any-return]

    def generate(self, tokens: Tensor, new: int, **more: Any) -> Tensor:
        self.cache.reset()
        return generate(self.model, tokens, new, past_key_values=self.cache, **more)

    def _look(self, new: int) -> None:
        """Makes the places and masks of `new` tokens, which `generate` makes outside of the
        model too."""
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
        self.masks, self.told = _contiguous(masks), told


def _contiguous(masks: Any) -> Any:
    """Returns masks in the form that `generate` passes: one, one for each kind of layer, or None if
    all is seen."""
    if isinstance(masks, dict):
        return {kind: _contiguous(mask) for kind, mask in masks.items()}
    return None if masks is None else masks.contiguous()


class Programs:
    """A model compiled by `qfx.compile_for_generate`. `bits`: of keys and of values."""

    def __init__(self, scheme: str, case: Case, model: Any, bits: tuple[int, int] = (8, 8)) -> None:
        keys, values = bits
        sizes: dict[str, Any] = {"max_length": case.length, "batch_sizes": (case.batch,)}
        self.model = compile_for_generate(model, scheme, **sizes, key_bits=keys, value_bits=values)
        self.cache: Any = None
        self.weights = linear_bytes(self.model)
        for _ in range(-(-TRIALS // case.new)):  # in which programs choose prefetch settings
            self.generate(torch.zeros(case.batch, 1, dtype=torch.int64), case.new + 1)

    def prefill(self, tokens: Tensor) -> Tensor:
        from transformers.cache_utils import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        return self.step(tokens)

    def prepare(self) -> None:
        pass

    def step(self, token: Tensor) -> Tensor:
        found = self.model(
            input_ids=token, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return found.logits[:, -1]  # type: ignore[no-any-return]

    def generate(self, tokens: Tensor, new: int, **more: Any) -> Tensor:
        return generate(self.model, tokens, new, **more)


def linear_bytes(model: nn.Module, scheme: str = "") -> int:
    """Returns the bytes of the weights of all linears, each counted once. `scheme`: the preset
    that a compiler packs float ones in."""
    codes = (m.weight for _, m in stored_linears(model) if isinstance(m, qfx.nn.Linear))
    stored = {w.data_ptr(): w.nbytes for w in codes}
    floats = {m.weight.data_ptr(): m.weight for m in model.modules() if type(m) is nn.Linear}
    if not scheme:
        return sum(stored.values()) + sum(w.nbytes for w in floats.values())
    packed = PRESETS[scheme]
    return sum(stored_bytes(packed.w, packed.group, *w.shape) for w in floats.values())


@dataclass(frozen=True)
class Way:
    """A way to decode. `make(case, model)` returns a Decoder of the float32 model, which it may
    change. `packages`: those it needs, by their names for pip."""

    make: Callable[[Case, Any], Decoder]
    packages: tuple[str, ...] = ()


def inductor(case: Case, model: Any) -> Static:
    return Static(case, model, partial(torch.compile, backend=case.inner))


def compiled(scheme: str, case: Case, model: Any) -> Static:
    """Compiles with every linear in int8, whatever it gains."""
    options = {"inner": case.inner, "scheme": scheme, "minimum_gain": 0}
    size = linear_bytes(model, scheme)
    decoder = Static(case, model, partial(torch.compile, backend=qfx.backend, options=options))
    decoder.weights = size
    return decoder


def quantized(make: Callable[[Case, Any], Decoder], case: Case, model: Any) -> Decoder:
    return make(case, qfx.quantize_(model, qfx.Config(scheme="w8a8")))


def in_bfloat16(make: Callable[[Case, Any], Decoder], case: Case, model: Any) -> Decoder:
    return make(case, model.to(torch.bfloat16))


EAGER = "float32 eager"
WAYS: dict[str, Way] = {
    EAGER: Way(Static),
    "float32 Inductor": Way(inductor),
    f"{BF16} eager": Way(partial(in_bfloat16, Static)),
    f"{BF16} Inductor": Way(partial(in_bfloat16, inductor)),
    "qfx generate w8a8": Way(partial(Programs, "w8a8")),
    "qfx generate w5a8": Way(partial(Programs, "w5a8")),
    "qfx generate w4a8": Way(partial(Programs, "w4a8")),
    f"qfx generate w8a8 {BF16}": Way(partial(in_bfloat16, partial(Programs, "w8a8"))),
    f"qfx generate w4a8 {BF16}": Way(partial(in_bfloat16, partial(Programs, "w4a8"))),
    "qfx generate w8a8 values 4 bits": Way(partial(Programs, "w8a8", bits=(8, 4))),
    "qfx generate w8a8 cache 4 bits": Way(partial(Programs, "w8a8", bits=(4, 4))),
    "qfx w8a8": Way(partial(compiled, "w8a8")),
    "qfx w4a8": Way(partial(compiled, "w4a8")),
    "qfx quantize_": Way(partial(quantized, Static)),
    "qfx quantize_ by Inductor": Way(partial(quantized, inductor)),
}
