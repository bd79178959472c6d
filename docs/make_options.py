"""Writes docs/options.md: the fields of qfx.Config, their defaults, and what the presets mean.

python docs/make_options.py           # rewrites docs/options.md
python docs/make_options.py --check   # fails if it would change
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import qfx
from qfx.values.config import INNER, PRESETS
from qfx.values.scheme import BACKWARD, PER_COLUMN, PER_ROW, PER_TENSOR, QSpec, Scheme

OPTIONS = Path(__file__).with_name("options.md")
TEMPLATE = Path(__file__).with_name("options.template.md")
SHARED = {PER_ROW: "a row", PER_TENSOR: "all rows", PER_COLUMN: "a column"}
# What each field means; the page cannot be made while one is missing or too many.
MEANINGS = {
    "scheme": "a name of the table below, or a `qfx.Scheme`",
    "skip": "patterns of module paths or parameter names that stay float: "
    '`["lm_head", "layers.0"]`',
    "only": "patterns that may become int8, nothing else does; `skip` wins over it",
    "minimum_gain": "int8 only where the predicted float time is at least this many times the int8 "
    "time; `0` quantizes all that [int8 suits](limits.md#what-is-int8)",
    "inner": f"compiler of the rewritten graph: {', '.join(f'`{name}`' for name in INNER)}",
    "backward": "how gradients are computed where the model trains: "
    f"{' or '.join(f'`{name}`' for name in BACKWARD)}, which rounds stochastically",
    "recipe": "what calibration decided, or `qfx.pin`, a `qfx.Recipe` or its file: the matmuls it "
    "names follow it, whatever the cost model says",
    "guard": "rows of activations (tokens) whose relative error in int8 may exceed this, as "
    "`0.05`, run in float",
    "smoothing": "channels of a model that takes token ids are balanced between activation and "
    "weight before both are rotated; see below",
    "release_weights": "float weights that are packed give their memory back: "
    "[serving](serving.md#without-float-weights)",
    "embeddings": '`"int8"`: `qfx.quantize_` and `QfxConfig` make codes of embeddings too: '
    "[coverage](coverage.md#embeddings); an error under `torch.compile`, which replaces no modules",
}
# When one takes it: what the fields of a Scheme do not say.
PURPOSES = {
    "w8a8": "the default",
    "w8a8-symmetric": "",
    "w8a8-asymmetric": "",
    "w8a8-tensor": "",
    "w8a8-static": "needs the scales of a [recipe](calibration.md)",
    "w8a8-groups": "a scale for each block that is rotated",
    "w8": "only the weights are int8",
    "w7a7": "for processors without VNNI",
    "w5a8": "stored in 5.4 bits an element",
    "w4a8": "stored in 4.4 bits an element",
    "w5": "as `w5a8`, slower: for activations that must stay float",
    "w4": "as `w4a8`, slower",
}


def default(value: object) -> str:
    """As one writes it in `options={...}`, where lists are lists."""
    text = repr(list(value) if isinstance(value, tuple) else value)
    return f"`{text}`".replace("'", '"')


def spec(q: QSpec | None) -> str:
    if q is None:
        return "float"
    points = "no zero points" if q.symmetric else "zero points"
    shared = f"{q.group} features" if q.group else SHARED[q.axes]
    shared += ", packed" if q.packed else ""
    when = "static, " if q.static else ""
    return f"{q.bits} bits, {points}, {when}a scale for {shared}"


def scheme(name: str, value: Scheme) -> Sequence[str]:
    rotated = f"blocks of {value.rotation}" if value.rotation else "no"
    return (f"`{name}`", spec(value.x), spec(value.w), rotated, f"`{value}`", PURPOSES[name])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    known = fields(qfx.Config)
    for name, written, wanted in (
        ("MEANINGS", [*MEANINGS], [f.name for f in known]),
        ("PURPOSES", [*PURPOSES], [*PRESETS]),
    ):
        assert written == wanted, f"{name} has the rows {written}, not in order {wanted}"
    options = [(f"`{f.name}`", default(f.default), MEANINGS[f.name]) for f in known]
    schemes = [scheme(name, value) for name, value in PRESETS.items()]
    head = ("scheme", "x", "w", "rotated", "token", "remarks")
    text = TEMPLATE.read_text()
    text = text.replace("@options@", table(("option", "default", "meaning"), options))
    return text.replace("@schemes@", table(head, schemes))


if __name__ == "__main__":
    if "--check" in sys.argv:
        current = OPTIONS.read_text() == page()
        sys.exit(None if current else "docs/options.md is out of date")
    OPTIONS.write_text(page())
