"""Request: the arguments of a call of the model that programs may be able to run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from qfx.generate.buckets import INTEGERS
from qfx.generate.build_lock import is_compiling

_SERVED = {"use_cache", "return_dict", "logits_to_keep", "cache_position"}
OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


class EncoderSource(NamedTuple):
    """The input of the decoder from the encoder.

    `cache`: the caches of both attentions. `mask` [B, S]: 0 for padding of the encoder's output,
    None if there is none. `hidden` [B, S, D]: the encoder's output, None if the modules must
    compute it.
    """

    cache: EncoderDecoderCache
    mask: Tensor | None
    hidden: Tensor | None


class Request(NamedTuple):
    """The arguments of a call.

    `tokens` [B, T]: the token ids, None if the modules must run the call, because embeddings or
    `others` (such as images) are passed. `seen`: bool [B, n], the attention mask: False for
    padding. `positions` [B, T], or [A, B, T] for models whose positions have several axes. `keep`:
    logits_to_keep. `length`: T. `others`: names of arguments that programs do not take. `source`:
    the further input of the decoder of an encoder-decoder, None for other models.
    """

    tokens: Tensor | None
    cache: Cache
    seen: Tensor | None
    positions: Tensor | None
    keep: int | Tensor
    length: int
    others: tuple[str, ...] = ()
    source: EncoderSource | None = None

    def part(self, begin: int, end: int) -> Request:
        """Returns the request for the tokens `begin` to `end`. Its mask is still that of all
        tokens."""
        assert self.tokens is not None
        if (begin, end) == (0, self.length):
            return self
        tokens, positions = self.tokens[:, begin:end], self.positions
        if positions is not None:
            positions = positions[..., begin:end]
        return self._replace(tokens=tokens, positions=positions, length=end - begin)

    @property
    def last_alone(self) -> bool:
        """Whether only the logits of the last token are requested."""
        return isinstance(self.keep, int) and self.keep == 1

    def keeps_few(self, most: int) -> bool:
        """Whether only the logits of the last tokens are requested, of at most `most`."""
        return isinstance(self.keep, int) and 0 < self.keep <= most

    def first_kept(self, most: int) -> int:
        """Returns the index of the first token of a part of which all logits are requested: 0 if no
        token needs other programs than the last one."""
        alone = self.length <= most or self.last_alone or not self.keeps_few(most)
        return 0 if alone else max(self.length - int(self.keep), 0)

    def plain(self, first: int, positioned: bool) -> bool:
        """Whether the mask has a column for each of the `first` earlier and of the new tokens, and
        the model does not have to compute positions from it. `positioned`: whether the model takes
        positions."""
        if self.seen is None:
            return True
        whole = self.seen.shape[1] == first + self.length
        known = self.positions is not None or not positioned
        return whole and (known or bool(self.seen.all()))


def token_kind_arguments(config: Any) -> frozenset[str]:
    """Returns the names of arguments that state the kind of each token (text or image) and that can
    be ignored if all their elements are zero: every token is then text. Other models embed such
    numbers, zeros included, and add the embedding to that of the token, as GPT-2 does."""
    of_gemma3 = {"token_type_ids"} if config.model_type == "gemma3" else set()
    return frozenset({"mm_token_type_ids"} | of_gemma3)


def request_of(arguments: dict[str, Any], of_text: Collection[str] = ()) -> Request | None:
    """Returns the arguments of a call, by name, as a Request, or None for a call that only the
    modules can run. `of_text`: names of arguments that have no effect if they are zero."""
    arguments = {n: value for n, value in arguments.items() if not _says_nothing(n, value, of_text)}
    tokens, embedded = arguments.pop("input_ids", None), arguments.pop("inputs_embeds", None)
    cache = arguments.pop("past_key_values", None)
    seen, positions = arguments.pop("attention_mask", None), arguments.pop("position_ids", None)
    if (tokens is None) is (embedded is None) or not isinstance(cache, Cache):
        return None
    others = tuple(sorted(arguments.keys() - _SERVED))
    if "labels" in others or not {*others}.isdisjoint(OUTPUTS):
        return None
    if not all(arguments.get(n, True) for n in ("use_cache", "return_dict")):
        return None
    sizes = (embedded if tokens is None else tokens).shape[:2]
    if not _are_numbers(tokens, sizes) or not _are_numbers(positions, sizes, 3):
        return None
    if seen is not None and not (_on_cpu(seen) and seen.ndim == 2 and len(seen) == sizes[0]):
        return None
    seen = None if seen is None else seen.bool()
    tokens, positions = (None if t is None else t.long() for t in (tokens, positions))
    tokens = None if others else tokens
    keep = arguments.get("logits_to_keep", 0)
    return Request(tokens, cache, seen, positions, keep, sizes[1], others)


def _says_nothing(name: str, value: Any, of_text: Collection[str]) -> bool:
    """Whether the call has the same meaning without this argument."""
    if name in of_text and isinstance(value, Tensor):
        return not bool(value.any())
    empty = isinstance(value, dict | list | tuple) and not value
    return value is None or empty or (name in OUTPUTS and not value)


def _are_numbers(value: Any, sizes: torch.Size, most_axes: int = 2) -> bool:
    """Whether `value` is None, or integers [B, T], or [1, T] for all sequences, with up to
    `most_axes` axes in total. Other inputs are left to the modules, which report what is wrong."""
    if value is None:
        return True
    if not _on_cpu(value) or value.dtype not in INTEGERS or 0 in sizes:
        return False
    return value.ndim <= most_axes and value.shape[-2:] in (sizes, (1, *sizes[1:]))


def _on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def as_modules_would() -> bool:
    """Whether autograd, autocast or a compiler follows the computation, so that the modules must be
    used."""
    autocast = torch.is_autocast_enabled("cpu")
    return torch.is_grad_enabled() or autocast or is_compiling()


def hold_codes(cache: Cache, layers: list[Any]) -> None:
    """Makes an empty DynamicCache consist of these layers, which store int8 codes; does nothing for
    any other cache."""
    if is_empty(cache):
        cache.layers = layers
        cache.layer_class_to_replicate = None


def is_empty(cache: Cache) -> bool:
    """Whether the cache is a DynamicCache that nothing was written to."""
    return type(cache) is DynamicCache and cache.get_seq_length() == 0 and not cache.offloading
