"""The ways in which benchmarks/decode.py runs a language model of transformers, by PyTorch.

Each has a function that makes a `Decoder` of a float32 model; peers of other libraries are in
benchmarks/decode_peers.py. A static cache is used everywhere, so that all ways read as many keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import qfx


@dataclass(frozen=True)
class Case:
    """`batch` texts of `context` tokens, and `new` tokens that are decoded behind them."""

    folder: Path  # of the float32 model
    batch: int
    context: int
    new: int
    inner: str = "inductor"  # what compiles: tests take less

    @property
    def length(self) -> int:
        """Tokens that a cache must hold: generating gives the first new one by the prefill."""
        return self.context + self.new + 1


class Decoder(Protocol):
    """`generate` is there where the library has such a call."""

    def prefill(self, tokens: Tensor) -> Tensor:
        """Tokens [B, L], of new texts -> logits [B, V] of what follows."""

    def prepare(self) -> None:
        """What a step needs and is no part of it."""

    def step(self, token: Tensor) -> Tensor:
        """One token [B, 1] behind all before -> logits [B, V]."""


def own(tokens: Tensor) -> Tensor:
    """A copy with the strides that a tensor of this shape has of itself: Dynamo compiles again for
    others, though a dimension of one element makes them meaningless."""
    return tokens.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Way:
    """`make(case)` gives a Decoder; `packages` are those it needs, as pip knows them."""

    make: Callable[[Case], Decoder]
    packages: tuple[str, ...] = ()


class Static:
    """A model of transformers whose `forward` is what `compile` makes of it, and its StaticCache.
    What `step` passes is what `generate` does, so both run the same graph."""

    outside = "python"  # what a step does beside operators

    def __init__(self, case: Case, model: Any, compile: Callable[[Any], Any]) -> None:
        from transformers.cache_utils import StaticCache

        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=case.length)
        self.mask = torch.zeros(case.batch, 1, 1, case.length, dtype=torch.bool)
        self.told = 0
        shape = model.config.num_key_value_heads, model.config.head_dim
        self.cache.early_initialization(case.batch, *shape, torch.float32, torch.device("cpu"))
        model.forward = compile(model.forward)

    def prefill(self, tokens: Tensor) -> Tensor:
        self.cache.reset()
        self._tell(tokens.shape[1])
        return self._call(tokens, torch.arange(self.told).repeat(len(tokens), 1))

    def prepare(self) -> None:
        """Of a step, and of no interest: `generate` does it outside of the model too."""
        self._tell(self.told + 1)

    def step(self, token: Tensor) -> Tensor:
        place = torch.full_like(token, self.told - 1)
        return self._call(token, place, attention_mask=self.mask)

    def generate(self, tokens: Tensor, new: int) -> Tensor:
        """Greedily; texts [B, L + new]."""
        self.cache.reset()
        return self.model.generate(  # type: ignore[no-any-return]
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=self.cache,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )

    def _tell(self, told: int) -> None:
        self.told = told
        self.mask.copy_((torch.arange(self.mask.shape[-1]) < told).expand_as(self.mask))

    def _call(self, tokens: Tensor, places: Tensor, **more: Any) -> Tensor:
        found = self.model(
            input_ids=tokens,
            past_key_values=self.cache,
            position_ids=places,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
            **more,
        )
        return found.logits[:, -1]  # type: ignore[no-any-return]


def load(case: Case) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32).eval()


def _as_it_is(forward: Any) -> Any:
    return forward


def eager(case: Case) -> Static:
    return Static(case, load(case), _as_it_is)


def inductor(case: Case) -> Static:
    return Static(case, load(case), partial(torch.compile, backend=case.inner))


def compiled(options: dict[str, Any], case: Case) -> Static:
    options = {"inner": case.inner, **options}
    return Static(case, load(case), partial(torch.compile, backend=qfx.backend, options=options))


def quantized(scheme: str, case: Case) -> Static:
    return Static(case, qfx.quantize_(load(case), qfx.Config(scheme=scheme)), _as_it_is)


def quantized_compiled(scheme: str, case: Case) -> Static:
    model = qfx.quantize_(load(case), qfx.Config(scheme=scheme))
    return Static(case, model, partial(torch.compile, backend=case.inner))


class Step(nn.Module):
    """Token [B, 1], its place [1] and the mask [B, 1, 1, L] of keys and values [B, heads, L, D],
    two a layer, into which it is written -> logits [B, V].

    They are inputs: as buffers, which those of a StaticCache become, they would not export again
    after `qfx.rewrite`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, place: Tensor, mask: Tensor, *cache: Tensor) -> Tensor:
        found = self.model.model(
            token,
            past_key_values=_Given(cache, place),
            attention_mask=mask,
            position_ids=place[None],
            use_cache=True,
        )
        return self.model.lm_head(found.last_hidden_state)[:, -1]  # type: ignore[no-any-return]


class _Given:
    """What an attention asks of a cache."""

    is_compileable = True

    def __init__(self, cache: tuple[Tensor, ...], place: Tensor) -> None:
        self.cache, self.place = cache, place

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        old_keys, old_values = self.cache[2 * layer : 2 * layer + 2]
        return (
            old_keys.index_copy_(2, self.place, keys),
            old_values.index_copy_(2, self.place, values),
        )


def packaged(program: Any) -> Callable[..., Any]:
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/step.pt2"
        )
        return torch._inductor.aoti_load_package(package)


class Exported:
    """The step as a package of AOTInductor, behind the prefill of the eager float model."""

    outside = "graph"

    def __init__(self, case: Case, rewrite: Callable[[Any], Any]) -> None:
        self.eager = eager(case)
        layers: Any = self.eager.cache.layers
        self.cache = [t for layer in layers for t in (layer.keys, layer.values)]
        self.place = torch.zeros(1, dtype=torch.int64)
        token = torch.zeros(case.batch, 1, dtype=torch.int64)
        inputs = (token, self.place, self.eager.mask, *self.cache)
        graph = rewrite(torch.export.export(Step(self.eager.model), inputs).module())
        self.run = packaged(torch.export.export(graph, inputs))

    def prefill(self, tokens: Tensor) -> Tensor:
        return self.eager.prefill(tokens)

    def prepare(self) -> None:
        self.place.fill_(self.eager.told)
        self.eager.prepare()

    def step(self, token: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.run(token, self.place, self.eager.mask, *self.cache)  # type: ignore[no-any-return]


def exported(config: qfx.Config | None, case: Case) -> Exported:
    def rewrite(graph: Any) -> Any:
        return graph if config is None else qfx.rewrite(graph, config)[0]

    return Exported(case, rewrite)


ALL = {"minimum_gain": 0}
EAGER = "float32 eager"
WAYS: dict[str, Way] = {
    EAGER: Way(eager),
    "float32 Inductor": Way(inductor),
    "float32 exported": Way(partial(exported, None)),
    "qfx": Way(partial(compiled, {})),
    "qfx w8a8": Way(partial(compiled, ALL)),
    "qfx w8a8-groups": Way(partial(compiled, {**ALL, "scheme": "w8a8-groups"})),
    "qfx w5a8": Way(partial(compiled, {**ALL, "scheme": "w5a8"})),
    "qfx w4a8": Way(partial(compiled, {**ALL, "scheme": "w4a8"})),
    "qfx quantize_": Way(partial(quantized, "w8a8")),
    "qfx quantize_ by Inductor": Way(partial(quantized_compiled, "w8a8")),
    "qfx w8a8 exported": Way(partial(exported, qfx.Config(minimum_gain=0))),
    "qfx w4a8 exported": Way(partial(exported, qfx.Config(minimum_gain=0, scheme="w4a8"))),
}
