"""CrossSteps: replaces the forward of an encoder-decoder.

The modules of the model run the encoder and the first tokens of the decoder, and so write the cache
of cross attention. Programs run the later steps.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from qfx.generate.buckets import padded
from qfx.generate.cache_slots import CacheSlots
from qfx.generate.decoder_positions import Distances, learns_distances
from qfx.generate.layout import CacheLayout
from qfx.generate.masks import own_blocks
from qfx.generate.model_output import EncoderOutput, encoder_decoder_output
from qfx.generate.request import EncoderSource, Request, hold_codes, is_empty, request_of
from qfx.generate.steps import Steps
from qfx.hf.cross_kv_layer import CrossKVLayer
from qfx.hf.kv_layer import KVLayer
from qfx.io.errors import UserError
from qfx.programs import Runner

_log = logging.getLogger("qfx.generate.steps")
_NAMES = {  # the names of the decoder's arguments for those of the whole model
    "decoder_input_ids": "input_ids",
    "decoder_attention_mask": "attention_mask",
    "decoder_position_ids": "position_ids",
    "decoder_inputs_embeds": "inputs_embeds",
}


class CrossSteps(Steps):
    """Replaces the forward of an encoder-decoder. `source_length`: the largest number of positions
    of the encoder's output."""

    def __init__(
        self,
        model: Any,
        inner: Callable[..., Any],
        layout: CacheLayout,
        layers: list[KVLayer],
        sizes: Sequence[int],
        logits_dtype: torch.dtype | None = None,
        *,
        source_length: int,
    ) -> None:
        """Prepares a model like `Steps`. Raises ValueError if the decoder of the model is not a
        separate module."""
        self.source_length = source_length
        self.positions = positions_of(model.config, "target")
        self.source = source_length, _hidden_size(model)
        self.masks_source = masks_source(model)
        self.source_tables: dict[int, Tensor] = {}
        super().__init__(model, inner, layout, layers, sizes, logits_dtype)
        self.distances = Distances(self.length) if learns_distances(model) else None

    def _forget(self) -> None:
        super()._forget()
        self._seen: WeakKeyDictionary[Cache, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_seen"}

    def prepare(self) -> None:
        """Builds the programs for one token, one for each batch size. The first call of the decoder
        with one token runs the modules; the second call builds the program and runs it. Both calls
        get zeros as the encoder's output."""
        length = min(self.source_length, 16) if self.masks_source else self.source_length
        for batch in self.sizes:
            token = torch.zeros(batch, 1, dtype=torch.int64, device=self.model.device)
            hidden = torch.zeros(
                batch, length, _hidden_size(self.model), dtype=self.model.dtype, device="cpu"
            )
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            with torch.no_grad():
                for _ in range(2):  # first the modules, then a program
                    self(
                        decoder_input_ids=token,
                        encoder_outputs=EncoderOutput(last_hidden_state=hidden),  # type: ignore[arg-type]
                        past_key_values=cache,
                        use_cache=True,
                    )

    def all_runners(self, batch: int) -> dict[int, Runner]:
        raise UserError(
            f"{type(self.model).__name__} has an encoder, and a file of programs holds "
            "decoders only"
        )

    def _request(self, arguments: dict[str, Any]) -> Request | None:
        cache = arguments.get("past_key_values")
        if not isinstance(cache, EncoderDecoderCache):
            return None
        encoded = arguments.get("encoder_outputs")
        hidden = None if encoded is None else encoded[0]
        of_encoder = {"encoder_outputs", "past_key_values", "attention_mask"}
        if hidden is not None:  # the inputs of the encoder are no longer needed
            of_encoder |= {"input_ids", "inputs_embeds", self.model.main_input_name}
        own = {_NAMES.get(n, n): v for n, v in arguments.items() if n not in of_encoder}
        request = request_of(own | {"past_key_values": cache.self_attention_cache}, self.of_text)
        source = EncoderSource(cache, arguments.get("attention_mask"), hidden)
        return None if request is None else request._replace(source=source)

    def _hold(self, request: Request) -> None:
        assert request.source is not None
        cross = request.source.cache.cross_attention_cache
        if is_empty(request.cache) and is_empty(cross):
            super()._hold(request)
            layers = [CrossKVLayer(self.source_length, *self.bits) for _ in self.shapes]
            hold_codes(cross, layers)

    def _begin(self, request: Request, batch: int, size: int) -> None:
        super()._begin(request, batch, size)
        for layer in self._all(request)[len(self.shapes) :]:
            layer.make_room(size)

    def _all(self, request: Request) -> list[Any]:
        assert request.source is not None
        return [*request.cache.layers, *request.source.cache.cross_attention_cache.layers]

    def _serve(self, request: Request, first: int) -> bool:
        """Whether programs can run the call. The cache of cross attention must be written, and no
        token may be padding, so that each token has one place and the position that the model
        assigns to it."""
        cross = self._all(request)[len(self.shapes) :]
        source = request.source
        if source is None or not all(type(layer) is CrossKVLayer for layer in cross):
            return False
        if source.hidden is None or not all(layer.is_initialized for layer in cross):
            return False
        if not self.masks_source and cross[0].seen != self.source_length:
            self._name_length(cross[0].seen)
            return False
        shape = (cross[0].batch, cross[0].seen)
        if source.mask is not None and self.masks_source and source.mask.shape != shape:
            return False
        whole = request.seen is None or bool(request.seen.all())
        return whole and self._counted(request, first) and super()._serve(request, first)

    def _name_length(self, found: int) -> None:
        """Logs, once for a model, that programs cannot attend to an encoder's output of `found`
        positions."""
        if "source" not in self.named:
            self.named.add("source")
            _log.warning(
                "the modules serve a source of %d positions, since the decoder of %s takes no mask "
                "of it: programs read %d, compile_for_generate(model, max_source_length=%d) others",
                found, type(self.model).__name__, self.source_length, found,
            )  # fmt: skip

    def _counted(self, request: Request, first: int) -> bool:
        """Whether the positions passed to the call, if any, are first, first + 1, ..."""
        numbers = self.places.numbers(first, request.length)
        return request.positions is None or bool((request.positions == numbers).all())

    def _room(self, first: int) -> int:
        if self.positions is None:
            return self.length
        return min(self.length, max(self.positions - first, 1))  # padding takes positions, too

    def _inputs(
        self, request: Request, at: CacheSlots, first: int, rows: int
    ) -> tuple[Tensor, ...]:
        """Returns the inputs of `_CrossStep` in step_graph.py that precede the tensors of the
        caches."""
        layer = self._all(request)[-1]
        inputs = super()._inputs(request._replace(positions=None), at, first, rows)
        more = (self._seen_of(request, len(inputs[0])), self._table_of_source(layer))
        return (*inputs, *more, *([self.distances.of(first, rows)] if self.distances else []))

    def _table_of_source(self, layer: CrossKVLayer) -> Tensor:
        if layer.table is not None:
            return layer.table
        size = len(layer.tensors[1])
        if size not in self.source_tables:
            self.source_tables[size] = own_blocks(size, self.source_length)
        return self.source_tables[size]

    def _seen_of(self, request: Request, size: int) -> Tensor:
        """Returns the positions of the encoder's output that each sequence may attend to: bool
        [size, 1, 1, S]."""
        assert request.source is not None
        layer = self._all(request)[-1]
        mask = request.source.mask if self.masks_source else None
        if mask is None:
            mask = torch.ones(layer.batch, layer.seen, dtype=torch.bool, device="cpu")
        known = self._seen.get(request.cache)
        if known is not None and len(known[1]) == size and torch.equal(known[0], mask):
            return known[1]
        seen = padded(mask.bool(), size, self.source_length)
        seen[len(mask) :, 0] = True  # padding sequences see one position
        found = seen[:, None, None].contiguous()
        self._seen[request.cache] = mask.clone(), found
        return found

    def _answer(self, logits: Tensor, request: Request) -> Any:
        assert request.source is not None and request.source.hidden is not None
        return encoder_decoder_output(logits, request.source.cache, request.source.hidden)


def positions_of(config: Any, side: str) -> int | None:
    """Returns the number of positions that the decoder has embeddings for (`side` "target"), or
    that the encoder's output may have ("source"). None if any number is possible."""
    for name in (f"max_{side}_positions", "max_position_embeddings"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return None


def masks_source(model: Any) -> bool:
    """Whether the model takes a mask with one element for each position of the encoder's output.
    Models whose input is not tokens, such as sound, take none."""
    names = inspect.signature(type(model).forward).parameters
    of_decoder = inspect.signature(model.get_decoder().forward).parameters
    takes = "attention_mask" in names and "encoder_attention_mask" in of_decoder
    return takes and model.main_input_name == "input_ids"


def written_layers(
    model: Any, forward: Callable[..., Any], length: int, bits: tuple[int, int]
) -> list[KVLayer]:
    """Returns a cache layer for each layer of the model's decoder, with the numbers of heads and
    features that the decoder writes. To find these, it decodes one token with an encoder's output
    of one position. Raises UserError for a model that does not write such a cache."""
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    hidden = torch.zeros(1, 1, _hidden_size(model), dtype=model.dtype, device="cpu")
    with torch.no_grad():
        forward(
            decoder_input_ids=token,
            encoder_outputs=EncoderOutput(last_hidden_state=hidden),  # type: ignore[arg-type]
            past_key_values=cache,
            use_cache=True,
        )
    parts: tuple[Any, ...] = (cache.self_attention_cache, cache.cross_attention_cache)
    written = [[layer for layer in part.layers if layer.is_initialized] for part in parts]
    if not written[0] or len(written[0]) != len(written[1]):
        raise UserError(
            f"{type(model).__name__} writes no keys and values to a cache that generate passes: it "
            "cannot have one in int8"
        )
    layers = [KVLayer(length, *bits) for _ in written[0]]
    for layer, found in zip(layers, written[0], strict=True):
        layer.lazy_initialization(found.keys, found.values)
    return layers


def _hidden_size(model: Any) -> int:
    """Returns the number of features of the encoder's output. Raises UserError if no configuration
    contains it."""
    for config in (model.config, getattr(model.get_encoder(), "config", None)):
        for name in ("d_model", "hidden_size"):
            found = getattr(config, name, None)
            if isinstance(found, int):
                return found
    raise UserError(
        f"the encoder of {type(model).__name__} has no configuration that says the size of its "
        "output (d_model or hidden_size): it cannot have programs"
    )
