"""Steps: the forward of a model, which runs programs if possible, and otherwise its modules."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from qfx.generate.buckets import MOST_ROWS, ROWS, batch_size_for, bucket_for, padded
from qfx.generate.cache_capacity import (
    check_alike,
    check_batch_size,
    check_request,
    check_step,
    make_room,
)
from qfx.generate.cache_slots import CacheSlots, cache_slots
from qfx.generate.forward_override import OwnForward
from qfx.generate.layout import CacheLayout
from qfx.generate.masks import Places
from qfx.generate.model_output import decoder_only_output, selected_logits
from qfx.generate.model_programs import Key, ModelPrograms
from qfx.generate.model_state import PREPARES_CACHE, values_of
from qfx.generate.request import (
    Request,
    as_modules_would,
    hold_codes,
    is_empty,
    request_of,
    token_kind_arguments,
)
from qfx.generate.rotary import axes_of_positions, constant_up_to
from qfx.hf.kv_layer import KVLayer
from qfx.hf.layer_kinds import made_layer
from qfx.programs import Runner
from qfx.programs.inputs import Bound

_log = logging.getLogger(__name__)


class Steps(OwnForward):
    """Replaces `inner`, the model's own forward, and has the same signature.

    `source`: the number of positions and features of the encoder's output, None for models without
    an encoder.
    """

    source: tuple[int, int] | None = None

    def __init__(
        self,
        model: Any,
        inner: Callable[..., Any],
        layout: CacheLayout,
        layers: list[KVLayer],
        sizes: Sequence[int],
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        """Prepares a model for programs. `layers`: layers of a cache that the model has written to.
        `layout`: the layout of caches that programs write to. `sizes`: batch sizes, to which
        smaller batches are padded. `logits_dtype`: the dtype of the logits, by default that of the
        model."""
        super().__init__(model, inner)
        self.layout, self.length, self.bits = layout, layout.length, layers[0].bits
        self.shapes = [layer.shape for layer in layers]
        self.places, self.sizes = Places(layout), tuple(sizes)
        self.rings = [i for i in range(len(layers)) if layout.slots_of(i) < self.length]
        self.firsts = layout.firsts
        self.own = [(type(layer), layer.window) for layer in self._layers()]
        self.logits_dtype = logits_dtype
        self.most = constant_up_to(model) or self.length  # longest sequence that programs serve
        names = self.__signature__.parameters
        self.keeps, self.positioned = "logits_to_keep" in names, "position_ids" in names
        self.axes = axes_of_positions(model.config)
        self.of_text = token_kind_arguments(model.config)
        self.named: set[str] = set()  # arguments that a warning was logged for
        self._forget()

    def _forget(self) -> None:
        """Discards all programs, and the tensors of caches that were looked up for them."""
        self.programs = ModelPrograms()
        self.bound: WeakKeyDictionary[Cache, tuple[int, list[Any], Bound]] = WeakKeyDictionary()

    @property
    def runners(self) -> dict[Key, Runner]:
        """The programs that were built."""
        return self.programs.runners

    @property
    def why_none(self) -> str | None:
        """Why the model can have no programs; None if no reason is known."""
        return self.programs.why_none

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy of the model, without programs, since these use the model's
        weights."""
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("programs", "bound")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def prepare(self) -> None:
        """Builds the programs that process one token, by calling them once for each batch size."""
        for batch in self.sizes:
            token = torch.zeros(batch, 1, dtype=torch.int64, device=self.model.device)
            how: dict[str, Any] = {"past_key_values": DynamicCache(), "use_cache": True}
            if self.axes is not None:  # as generate passes them
                how["position_ids"] = token.expand(self.axes, batch, 1)
            with torch.no_grad():
                self(input_ids=token, **how)

    def all_runners(self, batch: int) -> dict[int, Runner]:
        """Returns the program for each bucket (number of tokens of a step). Raises ValueError if a
        program cannot be built."""
        self.programs.look(self.model)
        found = {}
        for rows in (r for r in ROWS if r <= self.length):
            tokens = torch.zeros(batch, rows, dtype=torch.int64, device="cpu")
            cache = Cache(layers=self._layers())
            request = Request(tokens, cache, None, None, 1, rows)
            self._begin(request, batch, batch)
            at = cache_slots(cache.layers[0], self.places.numbers(0, rows), None, self.length)  # type: ignore[arg-type]
            inputs = self._inputs(request, at, 0, rows)
            runner = self.programs.runner(self, (batch, rows, ()), inputs, self._bound(request))
            if runner is None:
                raise ValueError(f"no program can be made of the model: {self.programs.why_none}")
            found[rows] = runner
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if as_modules_would() or self.model.training:
            return self.by_modules(*args, **kwargs)
        names = inspect.signature(self.inner).parameters if args else ()
        request = self._request(dict(zip(names, args, strict=False)) | kwargs)
        if request is None:
            return self.by_modules(*args, **kwargs)
        if new := sorted({*request.others} - self.named):
            self.named.update(new)
            _log.warning(
                "the modules serve calls that pass %s, which programs do not take",
                ", ".join(new),
            )
        if not self._is_ours(request.cache):
            self.programs.look(self.model)
            if self.programs.why_none is None:
                check_step(request.length, request.cache.get_seq_length(), self.length)
                self._hold(request)
        found = self._read(request) if self._is_ours(request.cache) else None
        return self.by_modules(*args, **kwargs) if found is None else found

    def _request(self, arguments: dict[str, Any]) -> Request | None:
        """Returns the arguments of a call, `given` by name, as a Request; None if the modules must
        run it."""
        return request_of(arguments, self.of_text)

    # --- caches ---

    def _hold(self, request: Request) -> None:
        """Gives an empty cache layers that store int8 codes."""
        hold_codes(request.cache, self._layers())

    def _layers(self) -> list[Any]:
        kinds = ((name, self.layout.kinds[name].window) for name in self.layout.layers)
        return [made_layer(*kind, self.length, self.bits) for kind in kinds]

    def _is_ours(self, cache: Cache) -> bool:
        """Whether the cache has layers that programs can read and write."""
        layers: list[Any] = cache.layers
        own = (self.length, self.bits)
        return len(layers) == len(self.own) and all(
            type(layer) is kind and (layer.capacity, layer.bits) == own and layer.window == window
            for layer, (kind, window) in zip(layers, self.own, strict=True)
        )

    def _begin(self, request: Request, batch: int, size: int) -> None:
        """Allocates memory for `batch` sequences, padded to a batch size of `size`."""
        make_room(request.cache.layers, self.shapes, batch, size)

    def prepare_cache(
        self, config: Any, arguments: dict[str, Any], *rest: Any, **others: Any
    ) -> Any:
        """Prepares the cache of `generate` like the model's own method, and takes the same
        arguments. The last one is the number of tokens of prompt and output. Raises ValueError,
        before the first token, if these do not fit into a cache of programs."""
        model: Any = self.model
        own = getattr(type(model), PREPARES_CACHE)
        found = own(model, config, arguments, *rest, **others)
        length = others["max_cache_length"] if "max_cache_length" in others else rest[-1]
        cache = arguments.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        taken = isinstance(cache, Cache) and (is_empty(cache) or self._is_ours(cache))
        if taken and self.programs.why_none is None:
            check_request(length, self.length)
        return found

    # --- steps ---

    def _read(self, request: Request) -> Any:
        """Runs programs on the tokens of a call, in one or several steps, and returns the model's
        output; None if the modules must run the call."""
        layer: Any = request.cache.layers[0]
        first: int = layer.seen
        count = request.length
        check_step(count, first, self.length)
        known = first > 0 and self.programs.state is not None  # None in a copy of the model
        if not known or (count > 1 and values_of(self.programs.tensors) != self.programs.state[0]):
            self.programs.look(self.model)
        if self.programs.why_none or request.tokens is None or not self._serve(request, first):
            return None
        batch = request.tokens.shape[0]
        check_batch_size(layer, batch)
        check_alike(request.cache.layers)
        self._begin(request, batch, batch_size_for(batch, self.sizes))
        at = cache_slots(layer, self.places.numbers(first, count), request.seen, self.length)
        found, begin, kept = [], 0, request.first_kept(MOST_ROWS)
        while begin < count:
            left = (count if begin >= kept else kept) - begin
            rows = bucket_for(left, self._room(first + begin))
            end = begin + min(rows, left)
            own = at._replace(places=at.places[:, begin:end])
            logits = self._step(request.part(begin, end), own, first + begin, rows)
            if logits is None:
                return None
            found.append(logits if begin >= kept else logits[:, :0])
            begin = end
        for layer in request.cache.layers:
            layer.seen, layer.kept = first + count, at.kept
        whole = found[-1] if request.last_alone else torch.cat(found, 1)
        return self._answer(selected_logits(whole, request.keep), request)

    def _serve(self, request: Request, first: int) -> bool:
        """Whether programs can process the tokens of the call, which follow `first` others."""
        count = request.length
        if not request.plain(first, self.positioned) or first + count > self.most:
            return False
        if self.axes is not None and request.positions is None and first > 0:
            return False  # images shift positions; the model computes by how much
        return count <= MOST_ROWS or (self.keeps and request.keeps_few(MOST_ROWS))

    def _room(self, first: int) -> int:
        """Returns the number of tokens that a step after `first` others may have."""
        return self.length

    def _answer(self, logits: Tensor, request: Request) -> Any:
        return decoder_only_output(logits, request.cache)

    def _step(self, request: Request, at: CacheSlots, first: int, rows: int) -> Tensor | None:
        """Runs one program; returns logits [B, T, V], or only those of the last token. Returns None
        if the model can have no program."""
        inputs = self._inputs(request, at, first, rows)
        bound = self._bound(request)
        axes = inputs[1].shape[:-2]
        runner = self.programs.runner(self, (len(inputs[0]), rows, tuple(axes)), inputs, bound)
        if runner is None:
            return None
        logits: Tensor = runner(*inputs, bound=bound)[0].to(
            self.logits_dtype or self.programs.dtype
        )
        batch = len(at.places)
        if logits.shape[1] <= request.length and len(logits) == batch:
            return logits
        return logits[:batch, : request.length]

    def _bound(self, request: Request) -> Bound:
        """Returns the tensors of the cache, looked up again when a tensor of any cache was
        replaced."""
        changes, known, layers = KVLayer.changes, self.bound.get(request.cache), self._all(request)
        if known is not None and known[0] == changes and known[1] == layers:
            return known[2]
        bound = Bound([tensor for layer in layers for tensor in layer.tensors])
        self.bound[request.cache] = changes, layers, bound
        return bound

    def _all(self, request: Request) -> list[Any]:
        """Returns the cache layers whose tensors are inputs of a program."""
        return list(request.cache.layers)

    def _inputs(
        self, request: Request, at: CacheSlots, first: int, rows: int
    ) -> tuple[Tensor, ...]:
        """Returns the inputs of `_StepModule` in step_graph.py that precede the tensors of the
        cache."""
        assert request.tokens is not None
        layer: Any = request.cache.layers[0]
        size, count = len(layer.key_scale), at.places.shape[1]
        values = (
            request.tokens,
            at.positions(request.positions, self.places.numbers(first, count)),
        )
        places = padded(at.places, size, rows, -1)
        hidden = None if at.hidden is None else padded(at.hidden, size, self.length)
        last = [self.places.numbers(count - 1, 1)] if rows > MOST_ROWS else []
        layers: list[Any] = request.cache.layers
        for ring in self.rings:
            layers[ring].enter(places, first + count)
        where: list[Tensor] = []
        for slots, begun in zip(self.places.slots(places), self.firsts, strict=True):
            where += (slots, self._table(layers[begun]))
        masks = self.places.masks(places, hidden)
        return (*(padded(t, size, rows) for t in values), *where, *last, *masks)

    def _table(self, layer: KVLayer) -> Tensor:
        if layer.table is not None:
            return layer.table
        assert layer.key_scale is not None
        return self.places.table(layer.key_scale.shape[0], layer.key_scale.shape[2])
