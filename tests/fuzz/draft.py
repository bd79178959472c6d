"""Drawing programs: `program(seed)` draws one from `tests/fuzz/grammar.py`.

`python -m tests.fuzz.draft SEED` prints the program of a seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.finish import finish
from tests.fuzz.grammar import GROUPS, PRODUCTS, WEIGHTS, Op, Product, Weight
from tests.fuzz.graphs import DTYPES, QUANTIZED, Program, Step, namespace
from tests.fuzz.held import SPECTRAL_NORM, WEIGHT_NORM, Holding
from tests.fuzz.hold import Meaning, add_held

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
HELD_CHANCE = 0.07
LARGEST, MOST_ELEMENTS, MOST_AXES = 1e3, 4096, 4


@dataclass
class Draft:
    """A program in the making, run in its own types as it grows, so that makers see tensors."""

    seed: int
    rng: random.Random = field(init=False)
    generator: torch.Generator = field(init=False)
    names: list[str] = field(default_factory=list)  # of the variables
    state: dict[str, tuple[str, Tensor]] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    shared: str | None = None  # the last x of a product
    weights: dict[str, str | None] = field(default_factory=dict)  # expression -> its constant
    changed: list[str] = field(default_factory=list)  # buffers that the program writes
    holdings: list[Holding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.real: dict[str, Any] = namespace({})
        self.training = self.rng.random() < 0.5
        dtype = self.rng.choices(DTYPES, (85, 7, 5, 3))[0]
        for i in range(self.rng.choice((1, 1, 2))):
            self._input(f"x{i}", dtype)

    # inputs and state

    def _input(self, name: str, dtype: torch.dtype) -> None:
        like = self.names and self.rng.random() < 0.6
        shape = self.real[self.names[0]].shape if like else self._shape()
        t = self._fill(shape)
        if t.ndim > 1 and self.rng.random() < 0.2:
            t = t.transpose(0, -1).contiguous().transpose(0, -1)
        self.inputs[name] = t.to(dtype)
        self.real[name] = self.inputs[name].clone()
        if self.names and self.rng.random() < 0.15:
            self.aliases[name] = self.rng.choice(("x0.mT", "x0.detach()", "x0[:1]"))
            self.real[name] = self.inputs[name] = eval(self.aliases[name], self.real)
        self.names.append(name)

    def _shape(self) -> tuple[int, ...]:
        shape = [self.size() for _ in range(self.rng.choice((2, 2, 3, 3, 4)))]
        while torch.Size(shape).numel() > MOST_ELEMENTS // 4:
            shape[shape.index(max(shape))] //= 2
        return tuple(shape)

    def _fill(self, shape: Sequence[int]) -> Tensor:
        t = torch.randn(*shape, generator=self.generator)
        kind = self.rng.randrange(8)
        if kind == 0:
            return t.abs() + 3
        if kind == 1:
            return torch.where(torch.rand(shape, generator=self.generator) < 0.05, 30 * t, t)
        if kind == 2:
            return t * (torch.arange(shape[0]) % 2).reshape(-1, *[1] * (len(shape) - 1))
        return t * self.rng.choice((0.1, 1, 1, 3))

    def size(self) -> int:
        return self.rng.choice(SIZES)

    def _register(self, kind: str, tensor: Tensor) -> str:
        name = f"{kind[0]}{len(self.state)}"
        self.state[name] = (kind, tensor)
        setattr(self.real["self"], name, tensor.clone())
        return f"self.{name}"

    def constant(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """A parameter or buffer, sometimes one that is already there."""
        t = self.real["self"]
        there = [n for n in self._floats() if getattr(t, n).shape == shape]
        there = [n for n in there if getattr(t, n).dtype == dtype]
        if there and self.rng.random() < 0.3:
            return f"self.{self.rng.choice(there)}"
        return self._new(shape, dtype, 0.5)

    def _new(self, shape: Sequence[int], dtype: torch.dtype, deviation: float) -> str:
        kind = self.rng.choices(("parameter", "buffer"), (2, 1))[0]
        return self._register(kind, (self.normal(shape) * deviation).to(dtype))

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _floats(self) -> list[str]:
        return [n for n, (_, t) in self.state.items() if t.is_floating_point()]

    def widths(self) -> list[int]:
        """A size for a new weight, and those that existing ones may serve for."""
        return [self.size(), *sorted({s for n in self._floats() for s in self._shape_of(n)})]

    def _shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name][1].shape)

    def weight(self, shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype) -> tuple[int, str]:
        """(n, an expression of shape shapes[n]), of a constant that may serve elsewhere too."""
        tied = [
            (row, n, name)
            for n, shape in shapes.items()
            for row in _fitting(shape)
            for name in self._floats()
            if self._shape_of(name) == row.stored(*shape) and self.state[name][1].dtype == dtype
        ]
        tied = [t for t in tied if t[2] in self.changed] or tied
        if tied and self.rng.random() < 0.4:
            row, n, name = self.rng.choice(tied)
        else:
            n, shape = next(iter(shapes.items()))
            row = self.rng.choice([WEIGHTS[0], WEIGHTS[0], *_fitting(shape)])
            name = self._stored(row, shape, dtype)
        literals = dict(zip("NK", shapes[n], strict=False), DTYPE=dtype)
        text = row.text.format(p=f"self.{name}", **literals)
        self.weights[text] = name
        return n, text

    def _stored(self, row: Weight, shape: Sequence[int], dtype: torch.dtype) -> str:
        """A new constant, in another type if the row casts; its entries survive that."""
        text = self._new(row.stored(*shape), dtype, max(shape[1:]) ** -0.5)
        name = text.removeprefix("self.")
        if "DTYPE" in row.text and dtype in QUANTIZED:
            kind, tensor = self.state[name]
            self.state[name] = (kind, tensor.float())
            setattr(self.real["self"], name, tensor.float())
        return name

    def mask(self, shape: Sequence[int], full: int | None = None) -> str:
        """With a column of ones, if any is to be `full`."""
        mask = torch.rand(shape, generator=self.generator) < 0.5
        if full is not None:
            mask[..., full] = True
        return self._register("mask", mask)

    def mask_and_large(self, m: int, n: int, dtype: torch.dtype) -> dict[str, str]:
        """A mask [m, n], and factors [n, 1] that are large for keys that it hides from all rows."""
        mask, hidden = torch.rand(m, n, generator=self.generator) < 0.5, torch.arange(n) % 3 == 1
        mask[:, 0], mask[:, hidden] = True, False
        by = torch.where(hidden, 10.0 ** self.rng.choice((1, 2, 4)), 1.0)[:, None].to(dtype)
        return {"mask": self._register("mask", mask), "LARGE": self._register("large", by)}

    def index(self, size: int) -> str:
        rows = torch.randint(size, (self.rng.choice((1, 2, 5)),), generator=self.generator)
        return self._register("index", rows)

    def changing_buffer(self) -> str | None:
        """A buffer for the program to change, perhaps one that has been a weight."""
        buffers = [n for n, (kind, _) in self.state.items() if kind == "buffer"]
        if not buffers:
            return None
        served = [n for n in buffers if n in self.weights.values()]
        self.changed.append(self.rng.choice(served or buffers))
        return f"self.{self.changed[-1]}"

    def another_dtype(self, dtype: torch.dtype) -> str:
        """Mostly one that qfx quantizes."""
        return str(self.rng.choice([d for d in (*QUANTIZED, *DTYPES) if d != dtype]))

    # operands

    def evaluate(self, expression: str) -> Tensor:
        return eval(expression, self.real)

    def named(self, **operands: str | None) -> dict[str, str] | None:
        """The arguments, or None when one was not found."""
        found = {n: o for n, o in operands.items() if o is not None}
        return found if len(found) == len(operands) else None

    def pick(self, test: Callable[[Tensor], bool] = lambda t: True) -> str | None:
        """A variable, often the latest."""
        fits = [n for n in self.names if test(self.real[n])]
        if not fits:
            return None
        return fits[-1] if self.rng.random() < 0.5 else self.rng.choice(fits)

    def some(self) -> str:
        found = self.pick()
        assert found is not None
        return found

    def pick_shared(self, test: Callable[[Tensor], bool]) -> str | None:
        """Often the input of the last product, which others should share and writes should hit."""
        if self.shared and self.rng.random() < 0.5 and test(self.real[self.shared]):
            return self.shared
        return self.pick(test)

    def pick_writable(self, test: Callable[[Tensor], bool] = lambda t: True) -> str | None:
        return self.pick_shared(lambda t: torch._debug_has_internal_overlap(t) == 0 and test(t))

    @staticmethod
    def apart(t: Tensor, target: Tensor) -> bool:
        """Of one shape, in other memory."""
        elsewhere = t.untyped_storage().data_ptr() != target.untyped_storage().data_ptr()
        return elsewhere and t.shape == target.shape

    # growth

    def grow(self) -> None:
        """Tries one more step."""
        groups, chances = zip(*GROUPS.values(), strict=True)
        group = self.rng.choices(groups, chances)[0]
        if self.steps and self.steps[-1].op.writes:
            group = PRODUCTS  # what is written should be read
        elif self.rng.random() < HELD_CHANCE:
            add_held(self)
            return
        name = self.rng.choice(list(group))
        self.add(name, group[name])

    def hold(
        self,
        holding: Holding,
        state: Mapping[str, tuple[str, Tensor]],
        meanings: Sequence[Meaning],
        call: str,
        x: str,
    ) -> bool:
        """Appends the call of a module as the steps that it means, unless one is out of range."""
        for name, (_, tensor) in state.items():
            setattr(self.real["self"], name, tensor.clone())
        texts = [op.text.format(out=result, **used) for _, op, used, result in meanings]
        for text in texts:
            exec(text, self.real)
        result = f"v{len(self.steps)}"
        passing = {result, *(used["x"] for _, _, used, _ in meanings if "x" in used)}
        if not all(_acceptable(self.real[name]) for name in passing):
            return False
        self.holdings.append(holding)
        self.state.update(state)
        sources = [f"{result} = {call}"] + [""] * (len(texts) - 1)
        for source, text, (name, op, used, made) in zip(sources, texts, meanings, strict=True):
            self._step(name, op, source, text, tuple(used.values()), made)
        self.shared, self.names = x, [*self.names, result]
        return True

    def _step(
        self, name: str, op: Op, text: str, means: str, operands: tuple[str, ...], made: str | None
    ) -> None:
        dtype = self.evaluate(made or operands[0]).dtype
        weight = None
        if made and op in (WEIGHT_NORM, SPECTRAL_NORM):
            self.weights[made] = _held_weight(operands[0])
        if isinstance(op.bound, Product) and op.bound.int8 and dtype in QUANTIZED:
            weight = self.weights.get(operands[1], _held_weight(operands[1]))
        self.steps.append(Step(name, op, text, means, operands, made, dtype, weight))

    def add(self, name: str, op: Op) -> bool:
        """Appends the operation unless it lacks operands or its result is out of range."""
        made = op.make(self)
        if made is None:
            return False
        operands = {n: o for n, o in made.items() if n.islower()}
        results = {r: f"v{len(self.steps)}{r[:1] * (r == 'other')}" for r in ("out", "other")}
        text = op.text.format(**made, **results)
        target = next(iter(operands.values()))
        before = self.evaluate(target).clone()
        exec(text, self.real)
        new = [v for r, v in results.items() if f"{{{r}}}" in op.text]
        if not all(_acceptable(t) for t in [self.evaluate(target), *map(self.evaluate, new)]):
            if not torch.equal(before, self.evaluate(target)):
                self.evaluate(target).copy_(before)
            return False
        self._append(name, op, text, operands, new)
        return True

    def _append(
        self, name: str, op: Op, text: str, operands: Mapping[str, str], new: list[str]
    ) -> None:
        if isinstance(op.bound, Product):
            self.shared = operands["x"] if operands["x"] in self.names else self.shared
        made = new[0] if new else None
        self._step(name, op, text, text, tuple(operands.values()), made)
        self.names += new


def _held_weight(operand: str) -> str | None:
    """The weight of a linear of the program, by itself."""
    return operand.removeprefix("self.") if operand.startswith("self.s") else None


def _fitting(shape: Sequence[int]) -> list[Weight]:
    return [row for row in WEIGHTS if not row.matrix or len(shape) == 2]


def _acceptable(t: Tensor) -> bool:
    fits = 1 <= t.ndim <= MOST_AXES and 0 < t.numel() <= MOST_ELEMENTS
    return fits and bool(t.isfinite().all()) and float(t.abs().max()) <= LARGEST


def program(seed: int) -> Program:
    """The program of a seed: 5 to 16 attempts at a step."""
    draft = Draft(seed)
    for _ in range(draft.rng.randrange(5, 17)):
        draft.grow()
    return finish(draft)


def shortest(name: str, op: Op) -> Program:
    """A program that ends in the operation: alone, or behind what makes its operands."""
    for seed in range(1000):
        draft = Draft(seed)
        for _ in range(3):
            if draft.add(name, op):
                return finish(draft)
            draft.grow()
    raise AssertionError(f"no operands for {name} within 1000 seeds")


if __name__ == "__main__":
    print(program(int(sys.argv[1])))
