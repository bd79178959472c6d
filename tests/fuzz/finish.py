"""What a drawn program returns, and how it is run: scheme, pattern, batches, holder of state."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qfx.values.config import PRESETS
from qfx.values.scheme import PER_TENSOR, QSpec, Scheme
from tests.fuzz.graphs import Chosen, Program

if TYPE_CHECKING:
    from tests.fuzz.draft import Draft

COARSE = Scheme(x=QSpec(bits=6), w=QSpec(bits=5, axes=PER_TENSOR))
GROUPED = Scheme(x=QSpec(symmetric=False), w=QSpec(bits=6, symmetric=False, group=64))
# What the preset, or a Scheme, may do to an operand at worst: a group has no larger step than
# its row.
SCHEMES: tuple[tuple[Any, Scheme, int], ...] = (
    ("w8a8", Scheme(x=QSpec(symmetric=False), rotation=64), 4),
    ("w8a8-symmetric", Scheme(), 1),
    ("w8a8-asymmetric", Scheme(x=QSpec(symmetric=False)), 3),
    ("w8a8-tensor", Scheme(x=QSpec(symmetric=False, axes=PER_TENSOR)), 1),
    (COARSE, COARSE, 1),
    ("w8", Scheme(x=None), 1),
    (GROUPED, replace(GROUPED, w=QSpec(bits=6, symmetric=False)), 1),
    ("w8a8-groups", PRESETS["w8a8-groups"], 1),
)
_NAME = re.compile(r"\bv\d+o?\b")


def finish(d: Draft) -> Program:
    option, worst, _ = d.rng.choices(SCHEMES, [s[2] for s in SCHEMES])[0]
    drawn = Program(
        d.seed, tuple(d.steps), d.inputs, _outputs(d), d.aliases, d.state, (option, worst),
        d.rng.random() < 0.15, tuple(d.holdings), d.training, _passed(d),
    )  # fmt: skip
    return replace(drawn, chosen=_chosen(d, drawn), batches=_batches(d))


def _outputs(d: Draft) -> tuple[str, ...]:
    """The last variable, most of what nothing else reads, and some others."""
    made = [n for n in d.names if n not in d.inputs]
    read = {n for step in d.steps for o in step.operands for n in _NAME.findall(o)}
    chances = [0.2 if n in read else 0.8 for n in made[:-1]]
    others = [n for n, c in zip(made, chances, strict=False) if d.rng.random() < c]
    return (*others, made[-1]) if made else (d.names[0],)


def _passed(d: Draft) -> frozenset[str]:
    """Sometimes, the state that is looked up in another module."""
    if d.rng.random() > 0.2:
        return frozenset()
    own = set(d.state) - {name for h in d.holdings for name in h.tensors}
    return frozenset(name for name in sorted(own) if d.rng.random() < 0.7)


def _chosen(d: Draft, drawn: Program) -> Chosen | None:
    """Sometimes a pattern for one of the weights; that of a linear may be called by its module."""
    weights = sorted({step.weight for step in d.steps if step.weight})
    if not weights or d.rng.random() > 0.25:
        return None
    name = d.rng.choice(weights)
    path = drawn.paths[name]
    held = any(name in holding.tensors for holding in d.holdings)
    pattern = path.rpartition(".")[0] if held and d.rng.random() < 0.5 else path
    return Chosen(d.rng.choice(("skip", "skip", "only")), pattern, name)


def _batches(d: Draft) -> tuple[int, ...]:
    """Sometimes another size of the first axis, of which the inputs have one. Dynamo takes no
    `out=` of another size."""
    if any(step.name == "out" for step in d.steps):
        return ()
    sizes = {t.shape[0] for t in d.inputs.values()}
    rows = min(sizes)
    others = [n for n in (1, rows // 2, 2 * rows) if n not in (0, rows)]
    return (d.rng.choice(others),) if len(sizes) == 1 and d.rng.random() < 0.15 else ()
