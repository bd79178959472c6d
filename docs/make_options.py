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
    "only": "patterns of what may become int8; everything else stays float; `skip` takes "
    "precedence",
    "minimum_gain": "a matmul becomes int8 if its predicted float time is at least this many times "
    "the int8 time; `0` quantizes everything that [is suited to int8](limits.md#what-is-int8)",
    "inner": f"compiler of the rewritten graph: {', '.join(f'`{name}`' for name in INNER)}; "
    "[what `program` is for](serving.md#models-as-programs)",
    "backward": "how gradients are computed in training: "
    f"{' or '.join(f'`{name}`' for name in BACKWARD)}; int8 gradients are rounded stochastically",
    "recipe": "a `qfx.Recipe` of `qfx.calibrate` or `qfx.pin`, or its file: the matmuls that it "
    "names follow the recipe, whatever the cost model says",
    "guard": "rows of activations (tokens) whose relative error in int8 may exceed this number, "
    "for example `0.05`, run in float",
    "smoothing": "for models that take token ids: balances channels between activation and weight "
    "before both are rotated: [below](#smoothing)",
    "release_weights": "moves the float weights to files once their int8 form exists: "
    "[serving](serving.md#without-float-weights)",
    "embeddings": '`"int8"`: `qfx.quantize_` and `QfxConfig` quantize embeddings too: '
    "[coverage](coverage.md#embeddings); an error under `torch.compile`, which replaces no modules",
    "saved_activations": "what a compiled training step keeps for the backward pass: `float` or "
    "`int8`, rounded stochastically: [training](training.md#what-a-step-keeps)",
}
# The last column of the table of schemes: when to use one.
PURPOSES = {
    "w8a8": "the default",
    "w8a8-symmetric": "",
    "w8a8-asymmetric": "",
    "w8a8-tensor": "",
    "w8a8-static": "needs the scales of a [recipe](calibration.md)",
    "w8a8-groups": "one scale for each rotated block",
    "w8": "only the weights are int8",
    "w7a7": "for processors without VNNI",
    "w5a8": "takes 5.4 bits per element",
    "w4a8": "takes 4.4 bits per element",
    "w5": "like `w5a8`, but slower; for activations that must stay float",
    "w4": "like `w4a8`, but slower; for activations that must stay float",
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
    head = ("scheme", "x", "w", "rotated", "short form", "remarks")
    text = TEMPLATE.read_text()
    text = text.replace("@options@", table(("option", "default", "meaning"), options))
    return text.replace("@schemes@", table(head, schemes))


if __name__ == "__main__":
    if "--check" in sys.argv:
        current = OPTIONS.read_text() == page()
        sys.exit(None if current else "docs/options.md is out of date")
    OPTIONS.write_text(page())
