"""What a language model writes when weights, or keys and values, have fewer bits.

SmolLM2-135M goes on with the beginnings of news texts, greedily, and each way is judged against
float: how much of its text is float's, where they part, and how far its distribution of the next
token is from float's along float's text (KL). Every token goes through the cache, one call each.
    python -m benchmarks.decode_texts [--ways float,w8a8] [--texts 20] [--tokens 64] [--save]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import qfx
from benchmarks.common import machine, merge
from benchmarks.decode_models import MODELS, prompts
from benchmarks.decode_static import Case, MakeCache, Static, as_it_is, load, own, static_cache
from qfx.hf import KVCache

FLOAT = "float"
KEY = ("way", "texts", "tokens")
Row = dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """`model` makes of the float32 model what runs; `cache` what keys and values are kept in."""

    model: Callable[[Any], Any] = as_it_is
    cache: MakeCache = static_cache


def quantized(scheme: str, model: Any) -> Any:
    return qfx.quantize_(model, qfx.Config(scheme=scheme))


def coded(key_bits: int, value_bits: int, config: Any, batch: int, length: int) -> Any:
    return KVCache(config, length, key_bits=key_bits, value_bits=value_bits)


WAYS: dict[str, Kept] = {
    FLOAT: Kept(),
    "cache 8 bits": Kept(cache=partial(coded, 8, 8)),
    "cache 8 bits and values 4": Kept(cache=partial(coded, 8, 4)),
    "cache 4 bits": Kept(cache=partial(coded, 4, 4)),
    "weights and cache 8 bits": Kept(partial(quantized, "w8a8"), partial(coded, 8, 8)),
    "weights 4 and cache 8 bits": Kept(partial(quantized, "w4a8"), partial(coded, 8, 8)),
    "weights w8a8": Kept(partial(quantized, "w8a8")),
    "weights w5a8": Kept(partial(quantized, "w5a8")),
    "weights w4a8": Kept(partial(quantized, "w4a8")),
}


def along(decoder: Static, told: Tensor, text: Tensor) -> Iterator[Tensor]:
    """Prompts [T, L] and what follows [T, N] -> N logits [T, V], of each token behind those before
    it."""
    yield decoder.prefill(told)
    for token in text[:, :-1].split(1, 1):
        decoder.prepare()
        yield decoder.step(own(token))


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Logits [T, V] -> KL [T] of their distribution from the reference's, in nats."""
    expected, found = reference.log_softmax(-1), logits.log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1)


def judge(text: Tensor, reference: Tensor) -> Row:
    """Texts [T, N] against float's. `first`: the token at which a text parts, N where it does not;
    the median of texts."""
    same = text == reference
    parted = torch.where(same.all(1), text.shape[1], (~same).int().argmax(1))
    return {
        "same_tokens": round(float(same.float().mean()), 4),
        "first": float(parted.float().quantile(0.5)),
        "whole": int(same.all(1).sum()),
    }


def measure(ways: Mapping[str, Kept], case: Case, told: Tensor) -> list[Row]:
    """A row for each way, of prompts [T, L]; the first is what others are judged by."""
    reference, expected = torch.zeros(0), [torch.zeros(0)]
    rows: list[Row] = []
    for name, way in ways.items():
        decoder = Static(case, way.model(load(case)), cache=way.cache)
        text = decoder.generate(told, case.new)[:, told.shape[1] :]
        if not rows:
            reference = text
        found = along(decoder, told, reference)
        if not rows:
            expected = [logits.clone() for logits in found]
            found = iter(expected)
        pairs = list(map(_compared, expected, found))
        kl, likeliest = (float(torch.stack(x).mean()) for x in zip(*pairs, strict=True))
        row = {"way": name, "texts": len(told), "tokens": case.new, **judge(text, reference)}
        rows.append({**row, "kl": float(f"{kl:.3g}"), "likeliest": round(likeliest, 4)})
    return rows


def _compared(expected: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Of each text: KL, and whether the likeliest token is the same."""
    same = expected.argmax(-1) == found.argmax(-1)
    return divergence(expected, found), same.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--told", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="that follow")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    names = dict.fromkeys((FLOAT, *options.ways.split(",")))
    if unknown := set(names) - set(WAYS):
        parser.error(f"unknown {', '.join(unknown)}; there are: {', '.join(WAYS)}")
    host, folder = machine(), MODELS["smollm2"]()
    told = prompts(folder, options.texts, options.told)
    case = Case(folder, len(told), options.told, options.tokens)
    with torch.no_grad():
        rows = measure({name: WAYS[name] for name in names}, case, told)
    rows = [{**row, "commit": host["commit"]} for row in rows]
    print(host)
    print(tabulate(rows, headers="keys"))
    if options.save:
        print(f"wrote {merge('decode-texts', rows, KEY)}")


if __name__ == "__main__":
    main()
