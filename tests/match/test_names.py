"""What a matmul is called: what `named_modules` says, however the code reaches its weight, so that
`skip`, `only` and recipes mean it; in whatever frame and for whichever layer it runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.graph.capture import Named, named_by_text
from tests.fuzz.checking import counting
from tests.lib.models import compiled

K = 8
X = torch.randn(4, K)
ALL = {"minimum_gain": 0}


def linear() -> nn.Linear:
    return nn.Linear(K, K)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(K, K))


class Model(nn.Module):
    """Holds `parts` as attributes and runs `run(self, x)`."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Passing(Model):
    """Looks up in the model that it holds what it has not itself, as adapters do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)


class Property(Model):
    @property
    def other(self) -> Any:
        return self._modules["a"]


class Shared(nn.Module):
    """Its linears belong to the class."""

    several = (linear(), linear())
    w = weight()

    def forward(this, x: Tensor) -> Tensor:
        return this.several[1](this.several[0](x)) @ this.w


class Weak(nn.Module):
    """Holds a linear twice, once weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.reference = weakref.ref(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.reference()(x)  # type: ignore[misc]


class Hooked(nn.Module):
    """One linear runs in a hook of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.late = linear(), linear()
        self.a.register_forward_hook(lambda module, args, y: self.late(y))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def hidden_run(s: Any, x: Tensor) -> Tensor:
    return s.a.forward(x)


def in_turn(modules: Any, x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def closure(x: Tensor, w: nn.Parameter = weight(), held: Any = {"a.b": linear()}) -> Tensor:  # noqa: B006, B008
    return held["a.b"](x) @ w


class Reached(NamedTuple):
    """A model, and a name for each of its matmuls that means no other of them."""

    make: Callable[[], Any]
    names: tuple[str, ...]


KEYS = ("k", "a b", "it's", 'q"', "x]y[", "é")
REACHED = {
    "attribute": Reached(lambda: Model(lambda s, x: s.a(x), a=linear()), ("a",)),
    "own_getattr": Reached(
        lambda: Passing(lambda s, x: s.a(s.base.fc(x)) @ s.w, w=weight(), a=linear(),
                        base=Model(lambda s, x: x, fc=linear())),
        ("base.fc", "a", "w"),
    ),
    "through_getattr": Reached(
        lambda: Passing(lambda s, x: s.fc(x), base=Model(lambda s, x: x, fc=linear())),
        ("base.fc",),
    ),
    "nested_getattr": Reached(
        lambda: Passing(lambda s, x: s.base(x), base=Passing(
            lambda s, x: s.base[0](x) @ s.w, w=weight(), base=nn.Sequential(linear()))),
        ("base.base.0", "base.w"),
    ),
    "getattr()": Reached(
        lambda: Model(lambda s, x: getattr(getattr(s, "a"), "0")(x), a=nn.Sequential(linear())),  # noqa: B009
        ("a.0",),
    ),
    "_modules": Reached(lambda: Model(lambda s, x: s._modules["a"](x), a=linear()), ("a",)),
    "property": Reached(lambda: Property(lambda s, x: s.other(x), a=linear()), ("a",)),
    "ParameterList": Reached(
        lambda: Model(lambda s, x: x @ s.p[0] @ s.p[-1], p=nn.ParameterList([weight(), weight()])),
        ("p.0", "p.1"),
    ),
    "ParameterDict": Reached(
        lambda: Model(lambda s, x: x @ s.p["k"], p=nn.ParameterDict({"k": weight()})), ("p.k",)
    ),
    "ModuleDict": Reached(
        lambda: Model(lambda s, x: in_turn(s.d.values(), x),
                      d=nn.ModuleDict({key: linear() for key in KEYS})),
        ("d.k", "d.a b", "d.it's", 'd.q"', "d.x]y[[]", "d.é"),  # [[] is a bracket in a pattern
    ),
    "Sequential": Reached(
        lambda: nn.Sequential(nn.Sequential(nn.ReLU(), linear()), nn.ReLU(), linear()),
        ("0.1", "2"),
    ),
    "weak_reference": Reached(Weak, ("a",)),
    "hook": Reached(Hooked, ("a", "late")),
    # Linears that are not called.
    "parameters": Reached(
        lambda: Model(lambda s, x: x @ next(s.a.parameters()), a=linear()), ("a.weight",)
    ),
    "bound_method": Reached(lambda: Model(hidden_run, a=linear()), ("a",)),
    "weak_tensors": Reached(
        lambda: (lambda a: Model(lambda s, x: x @ s.r().w @ s.r().t, a=a, r=weakref.ref(a)))(
            Model(lambda s, x: x, w=weight(), t=nn.Buffer(torch.randn(K, K)))),
        ("a.w", "a.t"),
    ),
    "second_name": Reached(
        lambda: (lambda a: Model(lambda s, x: s.b(x), a=a, b=a))(linear()), ("b",)
    ),
    # Not registered: what the code calls them.
    "list": Reached(
        lambda: Model(lambda s, x: in_turn(s.a, x), a=[linear(), linear()]), ("a.0", "a.1")
    ),
    "dict": Reached(
        lambda: Model(lambda s, x: in_turn(s.a.values(), x),
                      a={"k": linear(), "b.c": linear(), 3: linear(), "q'\"]": linear()}),
        ("a.k", "a.b.c", "a.3", "a.q'\"]"),
    ),
    "nested": Reached(
        lambda: Model(lambda s, x: s.a[1]["z"][0](s.a[0](x)), a=[linear(), {"z": [linear()]}]),
        ("a.0", "a.1.z.0"),
    ),
    "namespace": Reached(
        lambda: Model(lambda s, x: s.a.fc(x), a=SimpleNamespace(fc=linear())), ("a.fc",)
    ),
    "partial": Reached(
        lambda: Model(lambda s, x: s.g(s.a(x)), a=functools.partial(linear()),
                      g=functools.partial(F.linear, weight=weight())),
        ("a.func", "g.keywords.weight"),
    ),
    "class": Reached(Shared, ("several.0", "several.1", "w")),
    "function": Reached(lambda: closure, ("held.a.b", "w")),
}  # fmt: skip
CALLED = tuple(REACHED)[: tuple(REACHED).index("parameters")]


def int8(model: Any, *inputs: Tensor, **options: Any) -> int:
    """How many matmuls ran in int8 in the second call, the first being compiled."""
    torch._dynamo.reset()
    f = compiled(model, **options)
    with torch.no_grad():
        f(*inputs)
        return counting(f, inputs)[1].linear


@pytest.mark.parametrize("how", REACHED)
def test_each_name_skips_its_matmul(how: str) -> None:
    model, names = REACHED[how].make(), REACHED[how].names
    assert int8(model, X) == len(names)
    for name in names:
        assert int8(model, X, skip=[name]) == len(names) - 1, name
        assert int8(model, X, only=[name]) == 1, name


@pytest.mark.parametrize("how", CALLED)
def test_explain_says_each_linear_once_by_its_name(how: str) -> None:
    model = REACHED[how].make()
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    called = [row.module for row in qfx.explain(model, X, options=ALL).rows]
    assert sorted(name for name in called if name in linears) == sorted(linears)
    assert len(called) == len(REACHED[how].names)
    assert set(called) <= dict(model.named_modules()).keys()


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("L['self']._modules['a'].b[0]", Named("L['self']", "a.b.0")),
        ("getattr(getattr(L['s'].a, '0'), 'b')", Named("L['s']", "a.0.b")),
        ("L['s'].__dict__['_modules']['a'].0", Named("L['s']", "a.0")),
        ("L['s'].a[('t', 1)]._parameters['weight']", Named("L['s']", "a.t.1.weight")),
        ("dict(type(L['s']).__dict__)['a'][0]", Named("L['s']", "a.0")),
        ("L['s'].reference().a", Named("L['s']", "reference.a")),
        ("L['held']['a.b']._parameters['weight']", Named("L['held']", "held.a.b.weight")),
        ("L['s'].list[0]._modules_of['it\\'s \"']", Named("L['s']", "list.0._modules_of.it's \"")),
        ("layers.0.a-b", Named("", "layers.0.a-b")),
        ("", Named("", "")),
    ],
)
def test_names_by_text(source: str, named: Named) -> None:
    assert named_by_text(source) == named
