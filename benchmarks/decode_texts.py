"""The text that a language model generates with low-bit weights, or low-bit keys and values.

SmolLM2-135M continues the beginnings of news texts, greedily, and each way is compared with float:
how many tokens are the same, where the texts diverge, and how far its distribution of the next
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
    """A way. `model` converts the float32 model to the one that runs; `cache` makes the cache of
    keys and values."""

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
    """Yields, for prompts [T, L] and the text after them [T, N], N logits [T, V], of each token
    after those before it."""
    yield decoder.prefill(told)
    for token in text[:, :-1].split(1, 1):
        decoder.prepare()
        yield decoder.step(own(token))


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Returns the KL [T] of the distribution of logits [T, V] from the reference's, in nats."""
    expected, found = reference.log_softmax(-1), logits.log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1)


def judge(text: Tensor, reference: Tensor) -> Row:
    """Compares texts [T, N] with float's. `first`: the median over texts of the token at which a
    text first differs, N if it does not."""
    same = text == reference
    parted = torch.where(same.all(1), text.shape[1], (~same).int().argmax(1))
    return {
        "same_tokens": round(float(same.float().mean()), 4),
        "first": float(parted.float().quantile(0.5)),
        "whole": int(same.all(1).sum()),
    }


def measure(ways: Mapping[str, Kept], case: Case, told: Tensor) -> list[Row]:
    """Returns a row for each way, for prompts [T, L]; the first way is the reference for the
    others."""
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
    """Returns for each text the KL, and whether the likeliest token is the same."""
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
