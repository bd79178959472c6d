"""A decode step as a package of AOTInductor, for benchmarks/decode.py."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qfx
from benchmarks.decode_static import Case, Static, static_cache

FULL, SLIDING = "full_attention", "sliding_attention"


class Step(nn.Module):
    """The step: a token [B, 1], its place [1] and the mask [B, 1, 1, L] of keys and values [B,
    heads, L, D], two per layer, into which it is written -> logits [B, V]. There is a mask for each
    kind of layer if there are several kinds.

    Keys and values are inputs: as buffers, which those of a StaticCache become, they could not be
    exported again after `qfx.rewrite`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, place: Tensor, mask: Any, *cache: Tensor) -> Tensor:
        found = self.model.model(
            token,
            past_key_values=_Given(cache, place),
            attention_mask=mask,
            position_ids=place[None],
            use_cache=True,
        )
        return self.model.lm_head(found.last_hidden_state)[:, -1]  # type: ignore[no-any-return]


class _Given:
    """The part of the cache interface that attentions use."""

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


def whole_cache(config: Any, batch: int, length: int) -> Any:
    """Returns a cache of every token in every layer: windows are masks, and no layer moves its
    content."""
    config = copy.deepcopy(config)
    if hasattr(config, "layer_types"):
        config.layer_types = [FULL] * config.num_hidden_layers
    return static_cache(config, batch, length)


class Exported:
    """The step as a package of AOTInductor, after the prefill by the eager float model."""

    outside = "graph"

    def __init__(self, case: Case, model: Any, rewrite: Callable[[Any], Any]) -> None:
        self.eager = Static(case, model, cache=whole_cache)
        self.window = getattr(model.config, "sliding_window", None) or case.length
        layers: Any = self.eager.cache.layers
        cache = [t for layer in layers for t in (layer.keys, layer.values)]
        self.place = torch.zeros(1, dtype=torch.int64)
        kinds = getattr(model.config, "layer_types", None)
        shape = case.batch, 1, 1, case.length
        self.masks = {kind: torch.zeros(shape, dtype=torch.bool) for kind in {FULL, *(kinds or ())}}
        token = torch.zeros(case.batch, 1, dtype=torch.int64)
        self.given = self.place, self.masks if kinds else self.masks[FULL], *cache
        inputs = (token, *self.given)
        graph = rewrite(torch.export.export(Step(model), inputs).module())
        self.run = packaged(torch.export.export(graph, inputs))

    def prefill(self, tokens: Tensor) -> Tensor:
        self.place.fill_(tokens.shape[1] - 1)
        return self.eager.prefill(tokens)

    def prepare(self) -> None:
        self.place.add_(1)
        behind = self.place - torch.arange(self.masks[FULL].shape[-1])
        for kind, mask in self.masks.items():
            seen = (behind >= 0) & (behind < self.window) if kind == SLIDING else behind >= 0
            mask.copy_(seen.expand_as(mask))

    def step(self, token: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.run(token, *self.given)  # type: ignore[no-any-return]


def exported(config: qfx.Config | None, case: Case, model: Any) -> Exported:
    def rewrite(graph: Any) -> Any:
        return graph if config is None else qfx.rewrite(graph, config)[0]

    return Exported(case, model, rewrite)
