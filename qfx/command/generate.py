"""`qfx generate`: text from a language model whose steps run as int8 programs."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch

import qfx
from qfx.command.errors import CommandError
from qfx.command.open_model import OpenedModel
from qfx.generate.decoder import load_programs


@dataclass(frozen=True)
class Generated:
    """`text`: what follows the prompt. `tokens`: their number. `first_s`: seconds to the first
    token, which contain building the programs that no cache has. `token_s`: median seconds of the
    later ones; None if there is one token."""

    text: str
    tokens: int
    first_s: float
    token_s: float | None


def generated(
    opened: OpenedModel, prompt: str, new: int, scheme: str | None, streamed: bool
) -> Generated:
    """Generates greedily, and prints the text while it is made if `streamed`. Raises CommandError
    for a model that generates no text."""
    model: Any = opened.model
    tokenizer = opened.tokenizer
    if tokenizer is None or not getattr(model, "can_generate", bool)():
        why = f" ({opened.no_tokenizer})" if opened.no_tokenizer else ""
        raise CommandError(f"{opened.where} has no language model with a tokenizer{why}")
    given = tokenizer(prompt, return_tensors="pt")
    count = given["input_ids"].shape[1]
    if count == 0:
        raise CommandError("the prompt has no tokens")
    qfx.compile_for_generate(model, scheme, max_length=count + new)
    stream = _Stream(tokenizer, streamed)
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(**given, max_new_tokens=new, do_sample=False, streamer=stream)
    return stream.generated(begin)


def generated_by_programs(
    path: str, tokenizer: Any, ends: Set[int], prompt: str, new: int, streamed: bool
) -> Generated:
    """Does the same with a decoder from a file of programs, whose tokens `tokenizer` knows; `ends`:
    the tokens that end a text. Raises ValueError for another file, and for more tokens than its
    cache holds."""
    begin = time.perf_counter()
    decoder = load_programs(path)
    if decoder.batch != 1:
        raise CommandError(f"{path} reads {decoder.batch} texts at a time, expected 1")
    stream = _Stream(tokenizer, streamed)
    given = tokenizer(prompt, return_tensors="pt")["input_ids"]
    stream.put(given)
    while len(stream.tokens) < new and not ends & {*stream.tokens[-1:]}:
        given = decoder.read(given).argmax(-1, keepdim=True)
        stream.put(given)
    stream.end()
    return stream.generated(begin)


class _Stream:
    """Takes tokens as `generate` makes them. The first call brings the prompt."""

    def __init__(self, tokenizer: Any, streamed: bool) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._tokenizer, self._streamed, self._begun, self._printed = tokenizer, streamed, False, ""

    def put(self, value: torch.Tensor) -> None:
        if not self._begun:
            self._begun = True
            return
        self.times.append(time.perf_counter())
        self.tokens += value.flatten().tolist()
        text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        if self._streamed and not text.endswith("\ufffd"):  # half of a character
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text

    def end(self) -> None:
        if self._streamed:
            print()

    def generated(self, begin: float) -> Generated:
        """Returns the text and its times, of which the first is counted from `begin`."""
        times = sorted(b - a for a, b in zip(self.times, self.times[1:], strict=False))
        later = times[len(times) // 2] if times else None
        text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        return Generated(text, len(self.tokens), self.times[0] - begin, later)
