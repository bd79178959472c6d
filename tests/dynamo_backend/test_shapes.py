"""Symbolic sizes of every kind: each program is int8 in each of its calls, by as few graphs as
eager needs, and no defect of the pass is reported."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as symbolic_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters
from torch.export import Dim, export
from torch.overrides import TorchFunctionMode

import qfx
from qfx.ops.single_tensors import sqnr
from tests.dynamo_backend.test_backend import _int8_calls
from tests.lib.models import compiled, int8_by_hand
from tests.lib.pairs import every

K, N = 16, 12
G = torch.Generator().manual_seed(0)
UNBACKED = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
Run = Callable[..., Tensor]


class Linears(nn.Module):
    """`run(self, *inputs)`, a program that reads weights of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.back = nn.Linear(K, N), nn.Linear(N, K)
        self.patches = nn.Conv2d(3, N, 4, 4)
        self.attends = nn.MultiheadAttention(K, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(K, 2, 32, 0.0, batch_first=True)
        self.eval().requires_grad_(False)
        self.run = run

    def forward(self, *inputs: Any) -> Tensor:
        return self.run(self, *inputs)


class ByHand(TorchFunctionMode):
    """Linears in int8, by the references."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return int8_by_hand(*args) if func is F.linear else func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Case:
    """A program and the inputs of its `calls`: `int8` matmuls in each, `graphs` in all.

    `exact`: its matmuls are linears, whose bits are known. `mark`: what the user says of the first
    input's sizes. `settings`: of Dynamo; `oblivious`: to whether a captured size is 0 or 1.
    """

    run: Run
    calls: tuple[tuple[Any, ...], ...]
    int8: int = 1
    graphs: int = 1
    exact: bool = True
    dynamic: bool | None = True
    mark: Callable[[Tensor], Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    oblivious: bool = False
    inner: str = "eager"


def _rows(*leading: int) -> Tensor:
    return torch.randn(*leading, K, generator=G)


def _some(count: int, *chosen: int) -> Tensor:
    return torch.isin(torch.arange(count), torch.tensor(chosen, dtype=torch.long))


def _one(s: Linears, x: Tensor) -> Tensor:
    return s.fc(x)


def _attend(s: Linears, x: Tensor) -> Tensor:
    return s.attends(x, x, x, need_weights=False)[0]


def _counted(s: Linears, x: Tensor, mask: Tensor) -> Tensor:
    n = mask.sum().item()
    torch._check(n >= 0)
    torch._check(n <= x.shape[0])
    return s.fc(x[:n])


def _experts(s: Linears, x: Tensor, mask: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], N)
    for chosen in (mask, ~mask):
        rows = chosen.nonzero().squeeze(1)
        y = y.index_add(0, rows, s.fc(x[rows]))
    return y


def _each(*sizes: int | tuple[int, ...]) -> tuple[tuple[Tensor], ...]:
    return tuple((_rows(*size) if isinstance(size, tuple) else _rows(size),) for size in sizes)


PLAIN = {
    "rows": Case(_one, _each(3, 7)),
    "batch": Case(_one, _each((3, 5), (7, 4))),
    "none_and_one": Case(_one, _each(3, 0, 1, 4), graphs=3),
    "automatic": Case(_one, _each(5, 6, 7), graphs=2, dynamic=None),
    "two_layers": Case(lambda s, x: s.back(F.relu(s.fc(x))), _each(3, 7), 2),
    "every_other": Case(lambda s, x: s.fc(x[::2]), _each(6, 9)),
    "marked": Case(_one, _each(5, 7), mark=lambda x: mark_dynamic(x, 0), dynamic=None),
    "marked_range": Case(
        _one, _each(5, 7), mark=lambda x: mark_dynamic(x, 0, min=2, max=9), dynamic=None
    ),
    "marked_large": Case(
        _one, _each(3000, 4000), mark=lambda x: mark_dynamic(x, 0, min=2500, max=5000), dynamic=None
    ),
    "marked_unbacked": Case(
        _one, _each(5, 1, 0, 7), mark=lambda x: mark_unbacked(x, 0), dynamic=None, inner="aot_eager"
    ),
    "oblivious": Case(
        _one, _each(1, 7, 0), mark=lambda x: mark_dynamic(x, 0), dynamic=None, oblivious=True
    ),
    "parameters": Case(
        lambda s, x: s.back(s.fc(x)), _each(3, 7), 2,
        settings={
            "force_parameter_static_shapes": False,
            "force_nn_module_property_static_shapes": False,
        },
    ),
}  # fmt: skip
_IMAGES = tuple((torch.randn(b, 3, h, w, generator=G),) for b, h, w in ((2, 9, 11), (3, 13, 18)))
OTHERS = {
    "einsum": Case(
        lambda s, x: torch.einsum("bsk,nk->bns", x, s.fc.weight), _each((2, 5), (3, 4)), exact=False
    ),
    "left": Case(lambda s, x: s.fc.weight @ x.mT, _each((2, 5), (3, 4)), exact=False),
    "patches": Case(lambda s, x: s.patches(x), _IMAGES, exact=False),
    "attention": Case(_attend, _each((2, 5), (3, 7)), 2, exact=False),
    "attention_of_numbers": Case(_attend, _each((2, 5), (3, 7)), 2, exact=False, inner="aot_eager"),
    "encoder": Case(lambda s, x: s.layer(x), _each((2, 5), (3, 7)), 4, exact=False),
}  # fmt: skip
# Sizes made of n, for n of 6 and 9. Ranges of some have no lower end, whatever n.
EXPRESSIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "difference": lambda x, n: x[n:],
    "last_chunk": lambda x, n: x[:n].chunk(2)[1],
    "quotient": lambda x, n: x[: 40 // n],
    "multiple": lambda x, n: x[: n - n % 4],
    "blocks": lambda x, n: x[: n - n % 2].reshape(-1, 2, K),
    "cube": lambda x, n: torch.ones(n * n * n, K) * x[:1],
    "float": lambda x, n: x[: int(n * 0.7)],
    "root": lambda x, n: x[: int(n**0.5)],
    "ceiling": lambda x, n: x[: math.ceil(n / 3)],
    "logarithm": lambda x, n: x[: int(math.log2(n))],
    "rounded": lambda x, n: x[: round(n / 3)],
    "bits": lambda x, n: x[: n ^ 3],
    "power": lambda x, n: torch.ones(2**n, K) * x[:1],
    "maximum": lambda x, n: x[: torch.sym_max(n, 3)],
    "minimum": lambda x, n: x[: torch.sym_min(n, 30)],
    "range": lambda x, n: torch.arange(n, x.shape[0]).unsqueeze(1) * x[:1],
    "resized": lambda x, n: F.interpolate(x[:n].t()[None], scale_factor=1.5)[0].t(),
}
_X = _rows(40)
SIZES = {
    name: Case(lambda s, x, n, cut=cut: s.fc(cut(x, n)), ((_X, 6), (_X, 9)))
    for name, cut in EXPRESSIONS.items()
}
_MASKED = ((_rows(9), _some(9, 0, 3, 4)), (_rows(5), _some(5, 1)), (_rows(7), _some(7)))
PROGRAMS: dict[str, tuple[Run, tuple[Any, ...], int]] = {
    "mask": (lambda s, x, m: s.fc(x[m]), _MASKED, 1),
    "nonzero": (lambda s, x, m: s.fc(x[m.nonzero().squeeze(1)]), _MASKED, 1),
    "masked_select": (
        lambda s, x, m: s.fc(x.masked_select(m[:, None]).reshape(-1, K)), _MASKED, 1,
    ),
    "item": (_counted, _MASKED, 1),
    "grid": (lambda s, x, m: s.fc(x[m][:, None] + x), _MASKED, 1),
    "joined": (lambda s, x, m: s.back(s.fc(torch.cat([x[m], x]))), _MASKED, 2),
    "repeated": (
        lambda s, x, n: s.fc(x.repeat_interleave(n, 0)),
        ((_rows(3), torch.tensor([4, 0, 1])), (_rows(2), torch.tensor([1, 5]))), 1,
    ),
    "split": (
        lambda s, x, n: torch.cat([s.fc(part) for part in x.split(n.tolist())]),
        ((_rows(5), torch.tensor([4, 1])), (_rows(7), torch.tensor([0, 7]))), 2,
    ),
    "experts": (_experts, _MASKED, 2),
    "features": (
        lambda s, x, m: F.linear(x[:, m], s.fc.weight),
        tuple((torch.randn(3 + i, 20, generator=G), _some(20, *range(i, K + i))) for i in (0, 4)),
        1,
    ),
    "bias": (
        lambda s, x, m: F.linear(x, s.fc.weight, x.flatten()[: 2 * N][m]),
        ((_rows(3), _some(2 * N, *range(N))), (_rows(4), _some(2 * N, *range(5, 5 + N)))), 1,
    ),
}  # fmt: skip
DATA = {name: Case(*row, settings=UNBACKED, inner="aot_eager") for name, row in PROGRAMS.items()}
DATA["mask_of_known"] = Case(
    lambda s, x, m: s.fc(x[m]), (_MASKED[0],) * 2, dynamic=False, settings=UNBACKED
)
CASES = PLAIN | OTHERS | SIZES | DATA


@pytest.mark.parametrize("name", CASES)
def test_program(name: str) -> None:
    case, model = CASES[name], Linears(CASES[name].run)
    function = compiled(model, dynamic=case.dynamic, inner=case.inner)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(dynamo_config.patch(**case.settings))
        stack.enter_context(symbolic_config.patch(backed_size_oblivious=case.oblivious))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", message="qfx failed")  # as faults of the pass are
        counters.clear()
        for inputs in case.calls:
            if case.mark is not None:
                case.mark(inputs[0])
            _check(case, model, function, inputs)
    assert counters["stats"]["unique_graphs"] == case.graphs


def _check(case: Case, model: nn.Module, function: Any, inputs: tuple[Any, ...]) -> None:
    with ByHand():
        by_hand = model(*inputs)
    found, expected = function(*inputs), model(*inputs)
    assert _int8_calls(function, *inputs) == case.int8
    assert found.shape == expected.shape
    if case.exact:
        assert torch.equal(found, by_hand)
    else:
        assert 25 < sqnr(expected, found) < 80


EXPORTED = {
    "automatic": (_one, _each(3, 7), {0: Dim.AUTO}),
    "dynamic": (_one, _each((3, 5), (7, 4)), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}),
    "named": (_one, _each(3, 7), {0: Dim("rows", min=2, max=9)}),
    "derived": (lambda s, x: s.fc(x.reshape(-1, 2, K)), _each(6, 8), {0: 2 * Dim("pairs", max=9)}),
    "last_chunk": (lambda s, x: s.fc(x.chunk(2)[1]), _each(6, 9), {0: Dim.AUTO}),
    "unbacked": (lambda s, x: s.fc(x[x[:, 0] > 0]), _each(6, 9), {0: Dim.AUTO}),
}


@pytest.mark.parametrize("name, strict", every(EXPORTED, [False, True]))
def test_exported_program(name: str, strict: bool) -> None:
    run, calls, sizes = EXPORTED[name]
    model = Linears(run)
    program = export(model, calls[0], dynamic_shapes=((sizes,),), strict=strict)
    config = qfx.Config(scheme="w8a8-asymmetric", minimum_gain=0)
    gm, plan = qfx.rewrite(program.module(), config)
    assert (plan.quantized, plan.total) == (1, 1)
    for inputs in calls:
        with ByHand():
            by_hand = model(*inputs)
        assert torch.equal(gm(*inputs), by_hand)


@torch.library.custom_op("qfx_shapes::affine", mutates_args=())
def affine(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A linear whose fake implementation does not look at the bias."""
    return F.linear(x, w, bias)


@affine.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


qfx.register_matmul(torch.ops.qfx_shapes.affine)


def _jagged(*lengths: int) -> Tensor:
    parts = [_rows(length) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


REFUSED: dict[str, tuple[Run, tuple[Any, ...], str]] = {
    "nested": (_one, (_jagged(2, 3),), "the input is a nested tensor"),
    "nested_product": (
        lambda s, x: x @ torch.ones(2, K, 3), (_jagged(2, 3),),
        "the left operand is a nested tensor",
    ),
    "stride": (
        lambda s, x, n: F.conv2d(x, s.patches.weight, stride=n), (_IMAGES[0][0], 5),
        "stride, padding or dilation is computed",
    ),
    "bias": (
        lambda s, x, m: torch.ops.qfx_shapes.affine(x, s.fc.weight, x.flatten()[m]),
        (_rows(2), _some(2 * K, *range(N))), "the added term has shape [u0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_float_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run, inputs, reason = REFUSED[name]
    model = Linears(run)
    function = compiled(model, dynamic=True)
    with (
        torch.no_grad(),
        dynamo_config.patch(**UNBACKED),
        caplog.at_level("INFO", logger="qfx.dynamo_backend"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", message="qfx failed")
        found, expected = function(*inputs), model(*inputs)
        assert _int8_calls(function, *inputs) == 0
    assert reason in caplog.text
    assert all(map(torch.equal, found.unbind(), expected.unbind()))


def test_explain_and_calibrate_where_sizes_depend_on_data() -> None:
    model = Linears(lambda s, x, m: s.back(F.relu(s.fc(x[m]))))
    inputs = (_rows(9), _some(9, 0, 3, 4))
    with dynamo_config.patch(**UNBACKED):
        report = qfx.explain(model, *inputs, options={"minimum_gain": 0})
        recipe = qfx.calibrate(model, [inputs, inputs], qfx.Config(minimum_gain=0), progress=False)
        function = compiled(model, recipe=recipe)
        assert _int8_calls(function, *inputs) == report.quantized == 2
        assert 25 < sqnr(model(*inputs), function(*inputs)) < 80
    assert [row.shape for row in report.rows[:2]] == [f"u0x{K}x{N}", f"u0x{N}x{K}"]
