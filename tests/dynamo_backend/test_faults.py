"""What a NaN or an infinity does, scheme by scheme: the table of docs/numerics.md, by operators in
canonical and in fused form and by a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.graph.activations import ACTIVATIONS
from qfx.ops.code import Code
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, QSpec, Scheme
from tests.conftest import UseCosts, same_bits
from tests.lib.costs import Prices
from tests.lib.models import Applied, compiled

M, N, K = 5, 6, 64
ROW, COLUMN, FEATURE = 2, 4, 7  # of the faults
BAD = (torch.nan, torch.inf, -torch.inf)
G = torch.Generator().manual_seed(0)
X = torch.randn(M, K, generator=G)
Run = Callable[[Tensor], Tensor]


def _site(scheme: Scheme, **more: Any) -> dict[str, Any]:
    return {"recipe": qfx.Recipe((qfx.SiteRecipe("0", 0, N, K, scheme, **more),))}


STATIC = QSpec(axes=PER_TENSOR, static=True)
FACTOR = tuple(0.5 + k / K for k in range(K))


class Gives(NamedTuple):
    """Options of the backend, and what becomes of a fault in x and in w: rows of the table."""

    options: dict[str, Any]
    x: str = "F1"
    w: str = "F4"


ASYMMETRIC = QSpec(symmetric=False, axes=PER_TENSOR, static=True)
SCHEMES = {
    "per_token": Gives({"scheme": "w8a8-asymmetric"}),
    "symmetric": Gives({"scheme": "w8a8-symmetric"}),
    "rotated": Gives({"scheme": "w8a8"}),
    "7_bits": Gives({"scheme": "w7a7"}),
    "per_tensor": Gives({"scheme": "w8a8-tensor"}),
    "per_tensor_symmetric": Gives({"scheme": Scheme(x=QSpec(axes=PER_TENSOR))}),
    "per_tensor_rotated": Gives({"scheme": Scheme(x=QSpec(axes=PER_TENSOR), rotation=64)}),
    "weight_per_tensor": Gives({"scheme": Scheme(w=QSpec(axes=PER_TENSOR))}),
    "static": Gives(_site(Scheme(x=STATIC, rotation=64), scale=0.02)),
    "static_asymmetric": Gives(
        _site(Scheme(x=ASYMMETRIC), scale=0.02, zero_point=3)
    ),
    "factor": Gives(_site(Scheme(), factor=FACTOR)),
    "static_per_column": Gives(
        _site(Scheme(x=QSpec(axes=PER_COLUMN, static=True)), factor=FACTOR, scale=0.02)
    ),
    "groups": Gives({"scheme": Scheme(w=QSpec(bits=4, group=64))}),
    "groups_asymmetric": Gives(
        {"scheme": Scheme(w=QSpec(bits=4, symmetric=False, group=64))}
    ),
    "packed": Gives({"scheme": "w4a8"}),
    "packed_groups_of_both": Gives(
        {"scheme": Scheme(x=QSpec(group=32), w=QSpec(bits=5, group=32, packed=True))}
    ),
    "packed_weight_only": Gives({"scheme": "w4"}, x="F2"),
    "groups_of_x": Gives({"scheme": Scheme(x=QSpec(group=32))}),
    "groups_of_both": Gives({"scheme": "w8a8-groups"}),
    "asymmetric_weight": Gives({"scheme": Scheme(w=QSpec(symmetric=False))}),
    "columns_in_float": Gives(_site(Scheme(), outliers=(3, 9))),
    "the_column_in_float": Gives(_site(Scheme(), outliers=(3, FEATURE)), w="F6"),
    "weight_only": Gives({"scheme": "w8"}, x="F2"),
    "weight_only_rotated": Gives({"scheme": Scheme(x=None, rotation=64)}, x="F2"),
    "weight_per_column": Gives({"scheme": Scheme(w=QSpec(axes=PER_COLUMN))}, w="F5"),
    "guarded": Gives({"scheme": "w8a8-asymmetric", "guard": 0.5}, x="F3", w="F6"),
    "guarded_per_tensor": Gives({"scheme": "w8a8-tensor", "guard": 0.5}, x="F3", w="F6"),
}  # fmt: skip


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N)).requires_grad_(False)


def _with(t: Tensor, at: Any, value: float) -> Tensor:
    t = t.clone()
    t[at] = value
    return t


def _forms(model: nn.Module, fast: Run, options: dict[str, Any]) -> Iterator[Run]:
    yield fast
    for canonical in (False, True):
        config = qfx.Config(minimum_gain=0, **options)
        yield qfx.rewrite(qfx.trace(model, X), config, canonical=canonical)[0]


def _rows(y: Tensor, clean: Tensor, in_float: Tensor, bad: float, kind: str) -> None:
    """(F1) (F2) (F3)"""
    others = torch.arange(M) != ROW
    assert same_bits(y[others], clean[others])
    if kind == "F3":
        assert torch.equal(y[ROW].nan_to_num(7), in_float[ROW].nan_to_num(7))
    elif kind == "F1" or bad != bad:
        assert y[ROW].isnan().all()
    else:
        assert not y[ROW].isfinite().any()


def _columns(y: Tensor, clean: Tensor, in_float: Tensor, kind: str) -> None:
    """(F4) (F5) (F6)"""
    others = torch.arange(N) != COLUMN
    if kind == "F5":
        assert y.isnan().all()
    elif kind == "F6":
        assert torch.equal(y[:, COLUMN].nan_to_num(7), in_float[:, COLUMN].nan_to_num(7))
        assert torch.allclose(y[:, others], in_float[:, others], atol=0.1)
    else:
        assert y[:, COLUMN].isnan().all() and same_bits(y[:, others], clean[:, others])


@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_a_linear(name: str) -> None:
    options, of_x, of_w = SCHEMES[name]
    model = _model()
    weight, bias = model[0].weight, model[0].bias
    kept, fast = weight.clone(), compiled(model, inner="aot_eager", **options)
    for run in _forms(model, fast, options):
        assert run(X).isfinite().all()
        assert run(X * torch.nan).isnan().all()
        for bad in BAD:
            x = _with(X, (ROW, FEATURE), bad)
            _rows(run(x), run(_with(X, ROW, 0.0)), model(x), bad, of_x)
    for bad in BAD:
        weight.copy_(_with(kept, COLUMN, 0.0))
        clean = [run(X) for run in _forms(model, fast, options)]
        weight.copy_(_with(kept, (COLUMN, FEATURE), bad))
        for run, expected in zip(_forms(model, fast, options), clean, strict=True):
            _columns(run(X), expected, model(X), of_w)
        weight.copy_(kept)
        clean = [run(X) for run in _forms(model, fast, options)]
        with_bias = _with(bias, COLUMN, bad)
        bias.copy_(with_bias)
        others = torch.arange(N) != COLUMN
        for run, expected in zip(_forms(model, fast, options), clean, strict=True):
            y = run(X)  # (F7)
            assert same_bits(y[:, COLUMN], with_bias[COLUMN].expand(M))
            assert same_bits(y[:, others], expected[:, others])
        bias.copy_(_with(bias, COLUMN, 0.0))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-tensor"])
@torch.no_grad()
def test_a_product(scheme: str, use_costs: UseCosts) -> None:
    """(F9) in a compiled graph; tests/ops/test_op_bmm.py has the operators."""
    use_costs(Prices(2.0))
    a, b = torch.randn(2, M, K, generator=G), torch.randn(2, N, K, generator=G)
    f = compiled(lambda a, b: a @ b.mT, inner="aot_eager", scheme=scheme)
    for bad in BAD:
        y = f(_with(a, (1, ROW, FEATURE), bad), _with(b, (0, COLUMN, FEATURE), bad))
        fault = torch.zeros(2, M, N, dtype=torch.bool)
        fault[1, ROW] = fault[0, :, COLUMN] = True
        assert torch.equal(y.isnan(), fault)
        assert same_bits(y[~fault], f(_with(a, (1, ROW), 0.0), b)[~fault])


@pytest.mark.parametrize("name", list(ACTIVATIONS)[1:])
@torch.no_grad()
def test_activations_keep_nan(name: str) -> None:
    """(E2) in the epilogue of the operator."""
    model = nn.Sequential(*_model(), Applied(ACTIVATIONS[name].reference))
    gm, _ = qfx.rewrite(qfx.trace(model, X), qfx.Config(minimum_gain=0, scheme="w8a8-tensor"))
    y = gm(_with(X, (ROW, FEATURE), torch.inf))
    assert y[ROW].isnan().all() and y.isnan().sum() == N


@torch.no_grad()
def test_codes_that_are_handed_on_keep_the_fault() -> None:
    """(F1) through linear_requantize, whose codes the second linear reads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, N))
    scheme = Scheme(x=STATIC)
    sites = (qfx.SiteRecipe(str(i), 0, n, K, scheme, None, 0.02) for i, n in enumerate((K, N)))
    config = qfx.Config(minimum_gain=0, recipe=qfx.Recipe(tuple(sites)))
    gm, _ = qfx.rewrite(qfx.trace(model, X), config)
    assert "linear_requantize" in str(gm.graph)
    _rows(gm(_with(X, (ROW, FEATURE), torch.nan)), gm(_with(X, ROW, 0.0)), X, torch.nan, "F1")


def _lsq(model: nn.Module) -> nn.Module:
    return qfx.prepare_qat(model, X, config=qfx.Config(scheme="w8a8-tensor"))


MODULES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "per_tensor": lambda model: qfx.quantize_(model, qfx.Config(scheme="w8a8-tensor")),
    "groups": lambda model: qfx.quantize_(model, qfx.Config(scheme="w8a8-groups")),
    "packed": lambda model: qfx.quantize_(model, qfx.Config(scheme="w4a8")),
    "learned_steps": _lsq,
    "binary": lambda model: qfx.prepare_binary(model, X),
}


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_a_module(name: str) -> None:
    """(F1), of 1-bit layers (F10)."""
    module = MODULES[name](_model().eval())
    for bad in BAD:
        y, clean = module(_with(X, (ROW, FEATURE), bad)), module(_with(X, ROW, 0.0))
        if name == "binary" and bad == bad:
            assert y.isfinite().all()
        else:
            _rows(y, clean, X, bad, "F1")


@torch.no_grad()
def test_a_given_scale_that_is_nan() -> None:
    """(F8)"""
    module = _lsq(_model().eval())
    for step in (module[0].x_log_step, module[0].w_log_step):
        before = step.clone()
        step.fill_(torch.nan)
        assert module(X).isnan().all()
        step.copy_(before)
    q, scale, _ = torch.ops.qfx.quantize(X, list(Code()), torch.tensor([torch.inf]))
    assert not q.any() and scale.isinf().all()


@pytest.mark.parametrize(("axes", "columns"), [((1,), [COLUMN]), (PER_TENSOR, list(range(N)))])
@torch.no_grad()
def test_a_binary_weight(axes: tuple[int, ...], columns: list[int]) -> None:
    """(F11)"""
    model = _model().eval()
    faulty = _with(model[0].weight, (COLUMN, FEATURE), torch.nan)
    packed = [torch.ops.qfx.binary_pack(w) for w in (faulty, faulty.nan_to_num(-1.0))]
    assert torch.equal(*packed)
    layer = qfx.nn.BinaryLinear.from_float(model[0], axes)
    layer.observe(X)
    layer.weight.copy_(faulty)
    y = layer(X).isnan()
    assert y.any(0).nonzero().flatten().tolist() == columns and y.sum() == M * len(columns)


@pytest.mark.parametrize("backward", ["float", "int8"])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-tensor"])
def test_gradients(scheme: str, backward: str) -> None:
    """(F12) (F13)"""
    model = _model().requires_grad_()
    f = compiled(model, inner="aot_eager", scheme=scheme, backward=backward)

    def gradients(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        torch.manual_seed(0)  # of stochastic rounding
        return torch.autograd.grad(f(x), (x, model[0].weight, model[0].bias), g)

    g = torch.randn(M, N, generator=torch.Generator().manual_seed(1))
    dx, dw, db = gradients(_with(X, (ROW, FEATURE), torch.nan), g)
    assert dx.isfinite().all() and dw.isnan().all() and db.isfinite().all()
    dx, dw, db = gradients(X, _with(g, (ROW, COLUMN), torch.inf))
    expected = torch.zeros(M, K, dtype=torch.bool)
    expected[ROW] = True
    assert torch.equal(~dx.isfinite(), expected)
    expected = torch.zeros(N, K, dtype=torch.bool)
    expected[COLUMN] = True
    assert torch.equal(~dw.isfinite(), expected)
    assert torch.equal(~db.isfinite(), expected[:, 0])
