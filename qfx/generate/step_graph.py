"""The graph of a step: a transformers model applied to a few tokens with a cache, rewritten to
int8."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from qfx.generate.cached_attention import by_cached_attention, by_given_masks, stepping
from qfx.generate.decoder_positions import (
    by_distances,
    given_positions,
    learns_distances,
    measured,
)
from qfx.generate.explicit_attention import read_codes
from qfx.generate.float32_steps import InFloat32, keep_halves
from qfx.generate.layout import CacheLayout
from qfx.generate.masks import named
from qfx.generate.model_output import EncoderOutput
from qfx.generate.model_state import is_capped, makes_masks
from qfx.generate.rotary import keep_frequencies
from qfx.generate.step_modules import ServedLinear, is_served, share_factors
from qfx.hf.cross_kv_layer import CrossKVLayer
from qfx.hf.kv_layer import NAMES, KVLayer
from qfx.pipeline import rewrite
from qfx.values.config import Config

_READS = (torch.ops.qfx.kv_keys.default, torch.ops.qfx.kv_values.default)
_KEEP = Config(skip=("*",))  # quantize_ has already quantized the weights


class _GivenLayer(KVLayer):
    """A layer of the cache whose tensors, and the places that it writes to, are inputs of the
    graph."""

    first: Tensor | int = (
        0  # number of tokens before those of the step, for modules that count them
    )

    def __init__(self, tensors: tuple[Tensor, ...], places: Tensor, table: Tensor) -> None:
        super().__init__(tensors[1].shape[2])
        self.is_initialized = True
        self.places, self.table = places, table
        for name, tensor in zip(NAMES, tensors, strict=True):
            setattr(self, name, tensor)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.capacity is not None
        return self.write(key_states, value_states, self.places, self.capacity)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.capacity is not None
        return self.capacity, 0

    def get_seq_length(self) -> Any:
        return self.first


class _WrittenLayer(CrossKVLayer):
    """A layer of cross attention whose tensors are inputs of the graph and hold `source_length`
    positions."""

    def __init__(self, tensors: tuple[Tensor, ...], source_length: int, table: Tensor) -> None:
        super().__init__(source_length)
        self.is_initialized, self.dtype = True, torch.float32
        self.seen, self.batch, self.table = source_length, len(tensors[1]), table
        for name, tensor in zip(NAMES, tensors, strict=True):
            setattr(self, name, tensor)


class _StepModule(nn.Module):
    """The module that is exported for a step of a decoder. Returns logits [B, T, V], or [B, 1, V].

    Inputs: tokens and their positions [B, T]; for each number of slots that layers have, the slots
    that are written [B, T] and the block table [B, slots / 16]; with `one`, the index [1] of the
    token whose logits are requested; a mask [B, 1, T, slots] for each kind of layers; four tensors
    for each layer's cache.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        layout: CacheLayout,
        one: bool,
        makes_masks: bool,
    ) -> None:
        super().__init__()
        self.inner, self.layout, self.one = InFloat32(model, forward), layout, one
        self.makes_masks = makes_masks
        self.takes_positions = "position_ids" in inspect.signature(forward).parameters

    def forward(self, tokens: Tensor, positions: Tensor, *rest: Tensor) -> Tensor:
        more: dict[str, Any] = {}
        kinds, sizes = self.layout.kinds, self.layout.slots
        where = {slots: rest[2 * i : 2 * i + 2] for i, slots in enumerate(sizes)}
        rest = rest[2 * len(sizes) :]
        if self.one:
            more["logits_to_keep"], *rest = rest  # type: ignore[assignment]
        masks, tensors = rest[: len(kinds)], rest[len(kinds) :]
        size = len(NAMES)
        layers = [
            _GivenLayer(tensors[size * i : size * (i + 1)], *where[self.layout.slots_of(i)])
            for i in range(len(tensors) // size)
        ]
        given = dict(zip(kinds, masks, strict=True))
        mask = named(kinds, list(masks))
        if self.makes_masks:  # a mask of as many tokens as there are places
            shape = len(tokens), masks[0].shape[-1]
            mask = torch.ones(shape, dtype=torch.int64, device=tokens.device)
        if self.takes_positions:
            more["position_ids"] = positions
        with stepping(layers, given):
            found = self.inner.call(
                input_ids=tokens,
                attention_mask=mask,
                past_key_values=Cache(layers=layers),  # type: ignore[arg-type]
                use_cache=True,
                return_dict=True,
                **more,
            )
        return found.logits  # type: ignore[no-any-return]


class _CrossStep(nn.Module):
    """The module that is exported for a step of an encoder-decoder.

    Inputs are those of `_StepModule`, with the following differences. The mask is followed by bool
    [B, 1, 1, S], the positions of the source that a sequence sees, by the block table [B, S / 16]
    of the blocks of the source that it reads, and, for models that learn them, by the distances of
    keys [T, L]. The tensors of each layer's cache are followed by those of each cross attention.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], source_length: int, hidden: int
    ) -> None:
        super().__init__()
        self.learns = learns_distances(model)
        self.inner, self.source_length, self.hidden = (
            InFloat32(model, forward),
            source_length,
            hidden,
        )
        self.takes_positions = "decoder_position_ids" in inspect.signature(forward).parameters

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Tensor, table: Tensor, mask: Tensor,
        seen: Tensor, source_table: Tensor, *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        context: Any = nullcontext()
        if self.learns:
            distances, *tensors = tensors  # type: ignore[assignment]
            context = measured(distances)
        parts = [tensors[i : i + len(NAMES)] for i in range(0, len(tensors), len(NAMES))]
        count = len(parts) // 2
        own = [_GivenLayer(part, places, table) for part in parts[:count]]
        for layer in own:
            layer.first = positions[0, 0]
        cross = [_WrittenLayer(part, self.source_length, source_table) for part in parts[count:]]
        batch, steps = tokens.shape
        nothing = torch.zeros(
            batch, self.source_length, self.hidden, dtype=torch.float32, device=tokens.device
        )
        with context:
            found = self.inner.call(
                decoder_input_ids=tokens,
                decoder_attention_mask=mask,
                attention_mask=seen.expand(batch, 1, steps, self.source_length),
                encoder_outputs=EncoderOutput(last_hidden_state=nothing),  # type: ignore[arg-type]
                past_key_values=EncoderDecoderCache(Cache(layers=own), Cache(layers=cross)),  # type: ignore[arg-type]
                use_cache=True,
                return_dict=True,
                **({"decoder_position_ids": positions} if self.takes_positions else {}),
            )
        return found.logits  # type: ignore[no-any-return]


def step_graph(
    model: nn.Module,
    forward: Callable[..., Any],
    layout: CacheLayout,
    one: bool,
    vectors: Mapping[str, Tensor],
    inputs: tuple[Tensor, ...],
    factors: Mapping[str, str],
    source: tuple[int, int] | None = None,
) -> fx.GraphModule:
    """Returns the graph of a step, which computes in float32.

    `forward`: the forward of the model, as its class defines it. `layout`: the layout of the cache.
    `one`: return the logits of only one token. `vectors`: the result of `float32_vectors`.
    `inputs`: the inputs of a step, whose sizes matter. `factors`: the result of `equal_factors`.
    `source`: the number of positions and features of the encoder's output, None for models without
    an encoder.

    Raises ValueError if an attention would convert the whole capacity of the cache to floats.
    """
    known: dict[Any, Any] = {}
    twin = _twin(model, known)
    keep_frequencies(twin)
    share_factors(twin, factors)
    makes = makes_masks(model)
    if makes:
        by_given_masks(twin)
    elif is_capped(model):
        by_cached_attention(twin)
    if isinstance(forward, MethodType):
        forward = MethodType(forward.__func__, known.get(forward.__self__, forward.__self__))
    with torch.inference_mode(False), torch.no_grad():
        plain = tuple(t.clone() if t.is_inference() else t for t in inputs)
        step: nn.Module = _StepModule(twin, forward, layout, one, makes)
        if source is not None:
            by_distances(twin, inputs[4].shape[-1])  # the last axis of the mask
            step = _CrossStep(twin, forward, *source)
        exported = torch.export.export(step, plain)
        graph: Any = exported.module()
        keep_halves(graph, vectors, "inner.model.")
        if source is not None:
            given_positions(graph)
        read_codes(graph)
        graph = rewrite(graph, _KEEP)[0]
    if any(node.target in _READS and node.users for node in graph.graph.nodes):
        raise ValueError("its attention does not read an int8 cache")
    return graph


def _twin(module: Any, known: dict[Any, Any]) -> Any:
    """Copies the modules of a model, with the same tensors. Export replaces attributes of the
    modules while it runs, and other threads may be using the original."""
    if module is None or module in known:
        return known.get(module)
    source = ServedLinear.of(module) if is_served(module) else module
    twin = known[module] = source.__class__.__new__(source.__class__)
    for name, value in vars(source).items():
        if name in ("_parameters", "_buffers"):
            value = dict(value)
        elif name == "_modules":
            value = {own: _twin(child, known) for own, child in value.items()}
        elif isinstance(value, MethodType):
            value = MethodType(value.__func__, known.get(value.__self__, value.__self__))
        vars(twin)[name] = value
    return twin
