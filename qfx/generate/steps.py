"""Steps: the forward of a model, which runs programs where it can, and its modules elsewhere."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from qfx.generate.asked import Asked, as_modules_would, asked_of, hold_codes
from qfx.generate.masks import Places
from qfx.generate.model_state import settings_of, tensors_of, values_of, why_none
from qfx.generate.program_cache import kept
from qfx.generate.rows import MOST_ROWS, ROWS, filled, rows_for
from qfx.generate.step_graph import step_graph
from qfx.hf.kv_cache import KVLayer
from qfx.nn.packed_together import packed_together
from qfx.programs import Runner, build
from qfx.programs.inputs import Bound

_log = logging.getLogger(__name__)


class Steps:
    """Called as `inner`, the model's own forward, whose signature it has."""

    def __init__(
        self,
        model: Any,
        inner: Callable[..., Any],
        spans: dict[str, int | None],
        layers: list[KVLayer],
    ) -> None:
        """`layers`: of a cache that the model has written to."""
        self.model, self.inner, self.spans = model, inner, spans
        self.length, self.bits = layers[0].capacity or 0, layers[0].bits
        self.shapes = [layer.shape for layer in layers]
        self.places = Places(spans, self.length)
        self.keeps = "logits_to_keep" in self.__signature__.parameters
        self.told: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        """As if no prompt had been read."""
        self.runners: dict[tuple[int, int], Runner] = {}
        self.why_none: str | None = None
        self.state: Any = None
        self.tensors: tuple[Tensor, ...] = ()
        self.bound: WeakKeyDictionary[Cache, tuple[int, list[Any], Bound]] = WeakKeyDictionary()
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the model has: programs are made of its own weights."""
        made = ("runners", "why_none", "state", "tensors", "bound", "lock")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def prepare(self, batch: int) -> None:
        """Makes the program of one token."""
        token = torch.zeros(batch, 1, dtype=torch.int64, device=self.model.device)
        with torch.no_grad():
            self(input_ids=token, past_key_values=DynamicCache(), use_cache=True)

    def all_runners(self, batch: int) -> dict[int, Runner]:
        """Of each number of rows. ValueError where no program can be made."""
        self._look()
        found = {}
        for rows in (r for r in ROWS if r <= self.length):
            tokens = torch.zeros(batch, rows, dtype=torch.int64, device="cpu")
            cache = Cache(layers=self._layers())
            self._begin(cache, batch)
            asked = Asked(tokens, cache, None, None, 1, rows)
            inputs = self._inputs(asked, 0, rows)
            runner = self._runner((batch, rows), inputs, self._bound(cache))
            if runner is None:
                raise ValueError(f"no program can be made of the model: {self.why_none}")
            found[rows] = runner
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if as_modules_would() or self.model.training:
            return self.inner(*args, **kwargs)
        names = inspect.signature(self.inner).parameters if args else ()
        asked = asked_of(dict(zip(names, args, strict=False)) | kwargs)
        if asked is None:
            return self.inner(*args, **kwargs)
        if not self._is_ours(asked.cache):
            self._look()
            if self.why_none is None:
                self._check_room(asked.length, asked.cache.get_seq_length())
                hold_codes(asked.cache, self._layers())
        found = self._read(asked) if self._is_ours(asked.cache) else None
        return self.inner(*args, **kwargs) if found is None else found

    # --- caches ---

    def _layers(self) -> list[Any]:
        return [KVLayer(self.length, *self.bits) for _ in self.shapes]

    def _is_ours(self, cache: Cache) -> bool:
        """It holds tokens in tensors that programs take, or will."""
        return len(cache.layers) == len(self.shapes) and all(
            type(layer) is KVLayer and (layer.capacity, layer.bits) == (self.length, self.bits)
            for layer in cache.layers
        )

    def _begin(self, cache: Cache, batch: int) -> None:
        """Memory for texts that the cache knows nothing of yet."""
        for layer, (heads, features) in zip(cache.layers, self.shapes, strict=True):
            if not layer.is_initialized:  # type: ignore[union-attr]
                empty = torch.empty(batch, heads, 0, features, dtype=torch.float32, device="cpu")
                layer.lazy_initialization(empty, empty)  # type: ignore[union-attr]

    def _look(self) -> None:
        """Forgets programs of a model that was changed since they were made."""
        with self.lock:
            tensors = tensors_of(self.model)
            state = (values_of(tensors), settings_of(self.model))
            if state == self.state:
                return
            self.runners.clear()
            packed_together(self.model)
            self.state = values_of(tensors), settings_of(self.model)
            self.tensors = tensors
            self._by_modules(why_none(self.model))

    def _by_modules(self, why: str | None) -> None:
        self.why_none = why
        if why is not None and why not in self.told:
            self.told.add(why)
            _log.warning(
                "the modules of %s generate, without programs: %s", type(self.model).__name__, why
            )

    # --- steps ---

    def _read(self, asked: Asked) -> CausalLMOutputWithPast | None:
        """Some tokens at a time. None where the modules serve it."""
        first: int = asked.cache.layers[0].seen  # type: ignore[union-attr]
        count = asked.length
        self._check_room(count, first)
        known = first > 0 and self.state is not None  # a copy of the model knows nothing
        if not known or (count > 1 and values_of(self.tensors) != self.state[0]):
            self._look()
        if asked.tokens is None or self.why_none or not asked.plain(first):
            return None
        if count > MOST_ROWS and not (self.keeps and asked.keep == 1):
            return None
        self._begin(asked.cache, asked.tokens.shape[0])
        found, begin = [], 0
        while begin < count:
            rows = rows_for(count - begin, self.length - first - begin)
            end = min(begin + rows, count)
            logits = self._step(asked.part(begin, end), first + begin, rows)
            if logits is None:
                return None
            found.append(logits)
            begin = end
        for layer in asked.cache.layers:
            layer.seen = first + count  # type: ignore[union-attr]
        whole = found[-1] if asked.keep == 1 else torch.cat(found, 1)
        return _output(_kept(whole, asked.keep), asked.cache)

    def _step(self, asked: Asked, first: int, rows: int) -> Tensor | None:
        """Logits [B, T, V], or of the last token alone."""
        inputs = self._inputs(asked, first, rows)
        assert asked.tokens is not None
        bound = self._bound(asked.cache)
        runner = self._runner((asked.tokens.shape[0], rows), inputs, bound)
        if runner is None:
            return None
        logits: Tensor = runner(*inputs, bound=bound)[0]
        return logits if logits.shape[1] <= asked.length else logits[:, : asked.length]

    def _check_room(self, count: int, first: int) -> None:
        if first + count > self.length:
            raise ValueError(
                f"{count} tokens behind {first} are more than the {self.length} that there is room "
                "for: compile_for_generate(model, max_length=...) says how many"
            )

    def _runner(
        self, key: tuple[int, int], inputs: tuple[Tensor, ...], bound: Bound
    ) -> Runner | None:
        with self.lock:
            if key not in self.runners and self.why_none is None:
                alone = (t.clone() for t in inputs)  # not views of what a caller has
                self._build(key, (*alone, *bound.tensors))
            return self.runners.get(key)

    def _build(self, key: tuple[int, int], inputs: tuple[Tensor, ...]) -> None:
        _log.info("making the program of %d texts, %d tokens a step", *key)
        try:
            runner = self._made(inputs, key[1] > MOST_ROWS)
        except Exception as why:  # of a model's code that cannot be exported, of any kind
            self._by_modules(f"{type(why).__name__}: {why}".split("\n\n")[0])
            return
        self.runners[key] = runner
        if runner.outside:
            _log.info("PyTorch runs %s of it", ", ".join(sorted({*runner.outside})))

    def _bound(self, cache: Cache) -> Bound:
        """Its tensors, looked at again when one of any cache became another."""
        changes, known = KVLayer.changes, self.bound.get(cache)
        if known is not None and known[0] == changes and known[1] == cache.layers:
            return known[2]
        bound = Bound([t for layer in cache.layers for t in layer.tensors])  # type: ignore[union-attr]
        self.bound[cache] = changes, list(cache.layers), bound
        return bound

    def _made(self, inputs: tuple[Tensor, ...], one: bool) -> Runner:
        how: dict[str, Any] = {"forward": self.inner, "windows": self.spans, "one": one}

        def make() -> Runner:
            return build(step_graph(self.model, inputs=inputs, **how), inputs)

        return kept(self.model, self, inputs, make, **how)

    def _inputs(self, asked: Asked, first: int, rows: int) -> tuple[Tensor, ...]:
        assert asked.tokens is not None
        batch, count = asked.tokens.shape
        positions = asked.positions
        if positions is None:
            positions = self.places.numbers(first, count)[None]
        masks = self.places.masks(asked.seen, first, batch, rows)
        places = self.places.numbers(first, rows)
        last = [self.places.numbers(count - 1, 1)] if rows > MOST_ROWS else []
        told = (filled(asked.tokens, rows), filled(positions.expand(batch, count), rows))
        return (*told, places, *last, *masks)


def _output(logits: Tensor, cache: Cache) -> CausalLMOutputWithPast:
    """As its class makes it, which looks at all of its fields several times: as long as a layer."""
    found = CausalLMOutputWithPast.__new__(CausalLMOutputWithPast)
    found["logits"], found["past_key_values"] = logits, cache
    return found


def _kept(logits: Tensor, keep: int | Tensor) -> Tensor:
    """As transformers' logits_to_keep says."""
    if isinstance(keep, int) and (keep == 0 or keep >= logits.shape[1]):
        return logits
    return logits[:, slice(-keep, None) if isinstance(keep, int) else keep]
