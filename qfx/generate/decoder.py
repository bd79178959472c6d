"""Decoder: runs programs from a file, without the model's code and without transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import qfx._C as _C
from qfx.files.tensor_file import safetensors, table_of, tensors_together
from qfx.generate.buckets import INTEGERS, MOST_ROWS, bucket_for, padded
from qfx.generate.masks import Places
from qfx.generate.program_file import check_steps, program_file
from qfx.io.errors import UserError
from qfx.io.safe_read import parsed
from qfx.ops.kv_cache import kv_empty
from qfx.programs import Runner
from qfx.programs.inputs import Bound
from qfx.programs.serialization import restored

T = TypeVar("T")
KEY = "qfx_programs"  # the key in the metadata of the file


def load_programs(path: str | Path, *, max_memory: int | None = None) -> Decoder:
    """Reads a file that `save_programs` wrote. The file may come from an untrusted source: it
    contains no code.

        decoder = load_programs("model.safetensors")

    `max_memory`: the largest number of bytes that the decoder's weights, cache and steps may take,
    by default the memory of the machine. Raises ValueError for a file that `save_programs` did not
    write, and for one whose steps need more memory or more operations than the sizes of its weights
    and cache account for; OSError if the file cannot be read.
    """
    return read_programs(path, lambda about, tensors: Decoder(about, tensors, max_memory))


def read_programs(path: str | Path, make: Callable[[Any, dict[str, Tensor]], T]) -> T:
    """Returns what `make` makes of the description and the tensors of a file of programs. Raises
    UserError for any other file and for what `make` refuses, and OSError."""
    safetensors()
    table = table_of(Path(path))
    if KEY not in table.metadata:
        raise UserError(f"{path} holds no programs: save_programs writes them")
    description = parsed(table.metadata[KEY], f"{path} holds no programs")
    _C.read_packed_again()  # the weights may be at the address of others that were freed
    try:
        return make(description, tensors_together(table))
    except UserError as why:
        raise UserError(f"{path} holds programs that are refused: {why}") from None
    except (LookupError, TypeError, AttributeError, ValueError) as why:
        raise UserError(f"{path} does not say what its programs are: {why!r}") from None


class Decoder:
    """A language model from a file of programs. It processes `batch` sequences at a time, with an
    int8 cache of `length` tokens.

        decoder = load_programs("model.safetensors")
        new_tokens = decoder.generate(tokens, 20)

    `reset` starts new sequences.
    """

    def __init__(
        self, description: Any, tensors: Mapping[str, Tensor], max_memory: int | None = None
    ) -> None:
        self._file = description, dict(tensors), max_memory
        file = program_file(description, tensors, max_memory)
        self.layout, self.batch = file.layout, file.batch
        self.length = file.layout.length
        self._runners: dict[int, Runner] = {
            rows: restored(each, tensors) for rows, each in file.programs.items()
        }
        check_steps(file, tensors, self._runners)
        self._places = Places(self.layout)
        self._rows = tuple(sorted(self._runners))
        self._tables = [self._places.table(self.batch, slots) for slots in self.layout.slots]
        layers = [
            kv_empty(self.batch, heads, self.layout.slots_of(i), features, *file.bits)
            for i, (heads, features) in enumerate(file.shapes)
        ]
        self._cache = Bound([tensor for layer in layers for tensor in layer])
        self.reset()

    def reset(self) -> None:
        """Empties the cache, so that the next tokens begin new sequences."""
        self._seen = torch.zeros(self.batch, 1, dtype=torch.int64, device="cpu")
        self._written = self._seen.clone()  # written tokens, including those of failed reads

    def __reduce__(self) -> Any:
        return _continued, (*self._file, self._seen, self._written, self._cache.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        """Returns a decoder in the same state, with its own copy of the cache; the weights are
        shared."""
        return _continued(*self._file, self._seen, self._written, self._cache.tensors)

    def __copy__(self) -> Decoder:
        """Returns a deep copy, because two decoders cannot write to one cache."""
        return self.__deepcopy__({})

    @property
    def seen(self) -> int:
        """The number of tokens in the cache, without padding, of the longest sequence."""
        return int(self._seen.max())

    def read(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Runs the model on tokens [batch, T], integers that follow the tokens of earlier calls.
        Returns the logits [batch, V] of the next token.

        `attention_mask` [batch, T]: 0 for padding, which must precede the tokens of a sequence.
        Raises ValueError for another batch size, and if the tokens do not fit.
        """
        count = self._checked(tokens, attention_mask)
        tokens, seen, begin = tokens.long(), self._seen, 0
        if attention_mask is None:
            places = seen + self._places.numbers(0, count)
        else:
            kept = attention_mask.bool()
            places = torch.where(kept, seen + kept.long().cumsum(1) - 1, -1)
        logits = tokens.new_empty(0)
        while begin < count:
            rows = bucket_for(count - begin, self.length, self._rows)
            end = min(begin + rows, count)
            until = places[:, begin:end].amax(1, keepdim=True) + 1
            self._written = torch.maximum(self._written, until)
            logits = self._step(tokens[:, begin:end], places[:, begin:end], rows)
            begin = end
        # after all steps: if an error or Ctrl-C ends them, none of these tokens counts as read
        self._seen = torch.maximum(seen, places.amax(1, keepdim=True) + 1)
        return logits

    def generate(self, tokens: Tensor, new: int, *, eos: int | None = None) -> Tensor:
        """Generates greedily; returns up to `new` tokens [batch, N] that follow `tokens`.

        A sequence ends with `eos` and is padded with it until all have ended. Raises ValueError for
        `new` below 1, and the errors of `read`.
        """
        if new < 1:
            raise UserError(f"new={new}: expected at least 1")
        logits, found = self.read(tokens), []
        ended = torch.zeros(self.batch, dtype=torch.bool, device="cpu")
        while True:
            token = logits.argmax(-1)
            if eos is not None:
                token = torch.where(ended, eos, token)
                ended |= token == eos
            found.append(token)
            if len(found) == new or bool(ended.all()):
                return torch.stack(found, 1)
            logits = self.read(token[:, None])

    def _step(self, tokens: Tensor, places: Tensor, rows: int) -> Tensor:
        count = tokens.shape[1]
        tokens, places = padded(tokens, self.batch, rows), padded(places, self.batch, rows, -1)
        masks = self._places.masks(places)
        last = [self._places.numbers(count - 1, 1)] if rows > MOST_ROWS else []
        where: list[Tensor] = []
        for slots, table in zip(self._places.slots(places), self._tables, strict=True):
            where += (slots, table)
        given = (tokens, places.clamp(min=0), *where, *last, *masks)
        logits: Tensor = self._runners[rows](*given, bound=self._cache)[0]
        return logits[:, -1 if rows > MOST_ROWS else count - 1]

    def _checked(self, tokens: Tensor, mask: Tensor | None) -> int:
        """Returns the number of tokens of each sequence. Raises UserError for tokens that do not
        fit."""
        if tokens.ndim != 2 or len(tokens) != self.batch or tokens.shape[1] < 1:
            raise UserError(
                f"tokens have shape {tuple(tokens.shape)}, expected [{self.batch}, T], T at least 1"
            )
        if tokens.dtype not in INTEGERS:
            raise UserError(f"tokens are {tokens.dtype}, expected integers")
        count = tokens.shape[1]
        if mask is not None and mask.shape != tokens.shape:
            raise UserError(
                f"attention_mask has shape {tuple(mask.shape)}, expected {tuple(tokens.shape)}: of "
                "these tokens alone, not of those before"
            )
        if self.seen + count > self.length:
            raise UserError(
                f"{count} tokens after {self.seen} do not fit into a cache of {self.length}: "
                "compile_for_generate(model, max_length=...) says how many"
            )
        self._check_not_overwritten()
        return count

    def _check_not_overwritten(self) -> None:
        """Raises UserError if a `read` that failed has overwritten tokens that the next one would
        attend to."""
        lost = int((self._written - self._seen).max())
        for window, slots in self.layout.kinds.values():
            if window is not None and lost > max(slots - window + 1, 0) and slots < self.length:
                raise UserError(
                    f"a read that failed has written {lost} tokens, and layers with a window of "
                    f"{window} hold {slots}: call reset(), and read the text again"
                )


def _continued(
    description: Any,
    weights: Mapping[str, Tensor],
    max_memory: int | None,
    seen: Tensor,
    written: Tensor,
    cache: Sequence[Tensor],
) -> Decoder:
    """Returns a decoder that continues from the state of another one, with a copy of its
    `cache`."""
    decoder = Decoder(description, weights, max_memory)
    decoder._seen, decoder._written = seen.clone(), written.clone()
    for own, read in zip(decoder._cache.tensors, cache, strict=True):
        own.copy_(read)
    return decoder
