"""Programs: a random graph as a value that can be run, printed, and interpreted with bounds."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfx.values.scheme import QSpec, Scheme
from tests.fuzz.changes import CHANGES
from tests.fuzz.grammar import LEFT, Op, Product
from tests.fuzz.held import BREAKS, Holding, found
from tests.lib.bounds import UNIT, Attention, Known, product, turned, widened

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
QUANTIZED = DTYPES[:3]
_DTYPE = re.compile(r"torch\.(b?float\d\d)\b")
_DOUBLE = "torch.float64, copy=True"  # a cast to another type is never an alias


@dataclass(frozen=True)
class Step:
    """One statement, and what it means in the algebra of the grammar: the call of a module is the
    first of several steps, the others of which have no text. `result`: the variable it assigns, if
    its error has a rule; `weight`: the name of the constant behind a product's right operand."""

    name: str
    op: Op
    text: str
    means: str
    operands: tuple[str, ...]
    result: str | None
    dtype: torch.dtype
    weight: str | None

    @property
    def exact_text(self) -> str:
        return _DTYPE.sub(_DOUBLE, self.means)

    def function(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The product as a function of its operands."""
        right = self.op.text.partition(" = ")[2].format(x="x", w="w", b="b")
        return eval(f"lambda x, w, b: {right}", {"torch": torch, "F": F})


class Chosen(NamedTuple):
    """A pattern for one constant: `skip` or `only`, the pattern, the constant's name."""

    option: str
    pattern: str
    name: str


@dataclass(frozen=True)
class Program:
    """A module's forward. `aliases`: the inputs that are views of another; `state`: parameters and
    buffers by kind; `scheme`: the option, and what it does at worst; `holdings`: its modules;
    `passed`: the state that is in another module, in which it looks up what it has not itself;
    `batches`: the sizes of the first axis in further calls."""

    seed: int
    steps: tuple[Step, ...]
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    aliases: dict[str, str]
    state: dict[str, tuple[str, Tensor]]
    scheme: tuple[Any, Scheme]
    dynamic: bool
    holdings: tuple[Holding, ...] = ()
    training: bool = True
    passed: frozenset[str] = frozenset()
    chosen: Chosen | None = None
    batches: tuple[int, ...] = ()

    @property
    def change(self) -> str:
        """How its first weight becomes half of what it was, between two calls."""
        return random.Random(f"change {self.seed}").choice(list(CHANGES))

    @property
    def source(self) -> str:
        lines = [s.text for s in self.steps if s.text] + [f"return {', '.join(self.outputs)},"]
        head = f"def forward(self, {', '.join(self.inputs)}):\n"
        return head + "".join(f"    {line}\n" for line in lines)

    def __str__(self) -> str:
        tensors = {n: ("input", t) for n, t in self.inputs.items()} | self.state
        known = [
            f"# {n}: {kind} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            + ("" if t.is_contiguous() else f" strides {list(t.stride())}")
            + (f" = {self.aliases[n]}" if n in self.aliases else "")
            for n, (kind, t) in tensors.items()
        ]
        head = f"# seed {self.seed}, scheme {self.scheme[0]}, dynamic={self.dynamic}"
        head += f", its first weight changes {self.change}"
        how = (self.chosen and self.chosen[:2], f"training={self.training}", self.batches)
        passed = f"# through __getattr__: {sorted(self.passed)}" if self.passed else "#"
        held = [f"# {holding}" for holding in self.holdings]
        return "\n".join([head, f"# {how}", passed, *held, *known, self.source])

    def module(self) -> nn.Module:
        """A fresh module with its own copy of the state."""
        namespace = {"torch": torch, "F": F}
        exec(compile(self.source, f"<program {self.seed}>", "exec"), namespace)
        aside = {n: path for h in self.holdings for n, path in h.paths.items()}
        members = {n: property(lambda self, path=p: found(self, path)) for n, p in aside.items()}
        bases = (Passing if self.passed else nn.Module,)
        module = type("Program", bases, {"forward": namespace["forward"], **members})()
        for name, (kind, tensor) in self.state.items():
            if name not in aside:
                _register(module.base if name in self.passed else module, name, kind, tensor)
        for holding in self.holdings:
            module.add_module(holding.name, holding.build(self.state))
        return module.train(self.training)

    @property
    def paths(self) -> dict[str, str]:
        """What the module calls each tensor of the state."""
        own = {n: f"base.{n}" if n in self.passed else n for n in self.state}
        return own | {n: path for h in self.holdings for n, path in h.paths.items()}

    def arguments(self) -> list[Tensor]:
        """Fresh inputs."""
        return list(_aliased(_copies(self.inputs), self.aliases).values())

    def of_size(self, rows: int) -> Program | None:
        """The same with so many rows in each input, if it runs on them."""
        inputs = {n: _rows(t, rows) for n, t in self.inputs.items()}
        changed = replace(self, inputs=inputs)
        try:
            with torch.no_grad():
                changed.module()(*changed.arguments())
        except (RuntimeError, IndexError, ValueError):
            return None
        return changed

    @property
    def breaks(self) -> bool:
        return any(holding.held == BREAKS for holding in self.holdings)

    def ties(self, holdings: Sequence[Holding]) -> bool:
        """Whether the source uses tensors of these modules by themselves."""
        return any(
            f"self.{name}" in s.text for h in holdings for name in h.tensors for s in self.steps
        )

    @property
    def is_new(self) -> bool:
        """Whether it is more than a function of its own tensors, called twice."""
        return bool(self.holdings or self.passed or self.chosen or self.batches)

    @property
    def int8(self) -> int:
        """How many products qfx is expected to quantize."""
        return sum(self.is_int8(step) for step in self.steps)

    def is_int8(self, step: Step) -> bool:
        """Whether its weight is a constant that neither the program writes nor a pattern spares."""
        return self._is_site(step) and not self.spares(step)

    def _is_site(self, step: Step) -> bool:
        graph = next(part for part in self._graphs() if any(s is step for s in part))
        written = {s.operands[0] for s in graph if s.name == "state"}
        return step.weight is not None and f"self.{step.weight}" not in written

    def _graphs(self) -> list[list[Step]]:
        """The steps between breaks: what another graph writes is a constant to this one."""
        calls = [f"self.{h.name}(" for h in self.holdings if h.held == BREAKS]
        parts: list[list[Step]] = [[]]
        for step in self.steps:
            if any(call in step.text for call in calls):
                parts.append([])
            parts[-1].append(step)
        return parts

    def spares(self, step: Step) -> bool:
        """Whether a pattern leaves a product with a weight float."""
        if self.chosen is None or step.weight is None:
            return False
        return (step.weight == self.chosen.name) == (self.chosen.option == "skip")

    @property
    def attentions(self) -> int:
        """How many are expected to become one int8 operator."""
        attend = [s for s in self.steps if isinstance(s.op.bound, Attention)]
        if self.chosen and self.chosen.option == "only":
            return 0
        return sum(s.dtype in QUANTIZED for s in attend) * self.scheme[1].fits_activations

    @property
    def products(self) -> int:
        return sum(isinstance(s.op.bound, Product) for s in self.steps)

    @property
    def writes_weights(self) -> bool:
        sites = sum(map(self._is_site, self.steps))
        return sites < sum(s.weight is not None for s in self.steps)

    def has(self, group: Mapping[str, Op]) -> bool:
        return any(s.name in group for s in self.steps)


class Interpreter:
    """Runs a program on float64 and bounds how far an implementation may be from that.

    `scheme` None: one that computes in the program's types; else one that may quantize the operands
    of every product, and attentions. The state lives on from call to call.
    """

    def __init__(self, program: Program, scheme: Scheme | None) -> None:
        self.program, self.scheme = program, scheme
        state = {n: t for n, (_, t) in program.state.items()}
        self.exact, self.errors = namespace(_doubles(state)), namespace(_zeros(state))

    def call(self, program: Program | None = None) -> dict[str, Known]:
        """The outputs, and the inputs as the call leaves them; `program`: with other inputs."""
        inputs = (program or self.program).inputs
        for namespace, made in ((self.exact, _doubles), (self.errors, _zeros)):
            namespace.update(_aliased(made(inputs), self.program.aliases))
        for step in self.program.steps:
            self._advance(step)
        return {n: self.known(n) for n in (*self.program.outputs, *self.program.inputs)}

    def known(self, expression: str) -> Known:
        return Known(eval(expression, self.exact), eval(expression, self.errors))

    def _advance(self, step: Step) -> None:
        if step.op.bound is None:  # it moves and selects elements, and so the errors
            exec(step.exact_text, self.exact)
            exec(step.exact_text, self.errors)
            return
        error = self._error(step)
        exec(step.exact_text, self.exact)
        if step.op.writes:
            target = eval(step.operands[0], self.errors)
            target.copy_(error)
            if step.result:
                self.errors[step.result] = target
        else:
            assert step.result is not None
            self.errors[step.result] = torch.empty_like(self.exact[step.result]).copy_(error)

    def _error(self, step: Step) -> Tensor:
        operands = [self.known(_DTYPE.sub(_DOUBLE, o)) for o in step.operands]
        u, bound = UNIT[step.dtype], step.op.bound
        codes = self.scheme is not None and step.dtype in QUANTIZED
        codes = codes and not self.program.spares(step)
        if isinstance(bound, Attention) and codes:
            return bound.in_codes(u, *operands)
        if not isinstance(bound, Product):
            assert bound is not None
            return bound(u, *operands)
        x, w, *rest = operands
        k = math.prod(w.v.shape[axis] for axis in bound.w_axes)
        if self.scheme is not None and codes:
            x, w = self._in_codes(step, bound, x, w, k)
        bias = rest[0] if rest else Known(*torch.zeros(2, 1).double())
        return product(u, step.function(), x, w, bias, k)

    def _in_codes(self, step: Step, p: Product, x: Known, w: Known, k: int) -> tuple[Known, Known]:
        """The operands as their codes stand for them. Where both are computed, the left one has the
        scheme's codes of x, the other is symmetric per row, and nothing is rotated."""
        assert self.scheme is not None
        block = self.scheme.block(k) if self.program.is_int8(step) else 0
        specs = (self.scheme.x, self.scheme.w)
        if step.weight is None:
            specs = (self.scheme.x, QSpec(bits=self.scheme.w.bits))
            specs = specs[::-1] if p.x_axes == LEFT.x_axes else specs
        x, w = turned(block, p.cut(x), p.x_axes), turned(block, w, p.w_axes)
        x = widened(specs[0], x, p.x_axes) if specs[0] else x
        w = widened(specs[1], w, p.w_axes) if specs[1] else w
        return p.joined(x), w


class Passing(nn.Module):
    """Looks up in another module what it has not itself, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Module()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)


def _register(module: nn.Module, name: str, kind: str, tensor: Tensor) -> None:
    if kind == "parameter":
        module.register_parameter(name, nn.Parameter(tensor.clone()))
    else:
        module.register_buffer(name, tensor.clone())


def _rows(t: Tensor, rows: int) -> Tensor:
    """The first rows, or all of them and from the start again; the strides' order stays."""
    chosen = t[torch.arange(rows) % t.shape[0]]
    return chosen.mT.contiguous().mT if t.ndim > 1 and not t.is_contiguous() else chosen


def namespace(state: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"torch": torch, "F": F, "self": SimpleNamespace(**state)}


def _doubles(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies with the same strides; masks and indices stay what they are."""
    return {n: t.double() if t.is_floating_point() else t for n, t in _copies(tensors).items()}


def _aliased(tensors: dict[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    return tensors | {n: eval(view, dict(tensors)) for n, view in aliases.items()}


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in tensors.items()}


def _zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t * 0 if t.is_floating_point() else t for n, t in _doubles(tensors).items()}
