"""Every spelling of a matmul becomes one site, and every other matmul-like node a reason."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import qfx
from qfx.graph.activations import ACTIVATIONS, Activation
from qfx.graph.views import T
from qfx.match import spellings
from qfx.match.base import Match, Unmatched
from qfx.match.matching import match
from qfx.match.site import Site
from tests.lib.pairs import every

K, N = 8, 6
W_NK, W_KN = nn.Parameter(torch.randn(N, K)), nn.Parameter(torch.randn(K, N))
BIAS = nn.Parameter(torch.randn(N))


class Holder(nn.Module):
    """Parameters in both layouts, and the spelling under test as its forward."""

    def __init__(self, spelling: Callable[..., Tensor]) -> None:
        super().__init__()
        self.nk, self.kn, self.b, self.spelling = W_NK, W_KN, BIAS, spelling

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(self, x)


# spelling -> (weight is stored [K, N], has a bias)
SPELLINGS: dict[str, tuple[Callable[..., Tensor], bool, bool]] = {
    "F.linear": (lambda s, x: F.linear(x, s.nk, s.b), False, True),
    "F.linear_no_bias": (lambda s, x: F.linear(x, s.nk), False, False),
    "F.linear_keywords": (lambda s, x: F.linear(input=x, weight=s.nk, bias=s.b), False, True),
    "F.linear_of_transposed": (lambda s, x: F.linear(x, s.kn.t()), True, False),
    "F.linear_of_T": (lambda s, x: F.linear(x, s.kn.T), True, False),
    "matmul": (lambda s, x: torch.matmul(x, s.kn), True, False),
    "matmul_keywords": (lambda s, x: torch.matmul(input=x, other=s.kn), True, False),
    "matmul_method": (lambda s, x: x.matmul(s.kn), True, False),
    "at": (lambda s, x: x @ s.kn, True, False),
    "at_t": (lambda s, x: x @ s.nk.t(), False, False),
    "at_T": (lambda s, x: x @ s.nk.T, False, False),
    "at_mT": (lambda s, x: x @ s.nk.mT, False, False),
    "at_transpose": (lambda s, x: x @ s.nk.transpose(0, 1), False, False),
    "at_transpose_negative": (lambda s, x: x @ torch.transpose(s.nk, -1, -2), False, False),
    "at_swapaxes": (lambda s, x: x @ s.nk.swapaxes(0, 1), False, False),
    "at_permute": (lambda s, x: x @ s.nk.permute(1, 0), False, False),
    "at_permute_tuple": (lambda s, x: x @ torch.permute(s.nk, (1, 0)), False, False),
    "at_transposed_twice": (lambda s, x: x @ s.kn.t().t(), True, False),
    "at_contiguous": (lambda s, x: x @ s.nk.t().contiguous(), False, False),
    "at_plus_bias": (lambda s, x: x @ s.kn + s.b, True, True),
    "bias_plus_at": (lambda s, x: s.b + x @ s.kn, True, True),
    "operator.matmul": (lambda s, x: operator.matmul(x, s.kn), True, False),
}
SPELLINGS_2D = {
    "mm": (lambda s, x: torch.mm(x, s.kn), True, False),
    "mm_keywords": (lambda s, x: torch.mm(x, mat2=s.kn), True, False),
    "mm_method": (lambda s, x: x.mm(s.nk.t()), False, False),
    "addmm": (lambda s, x: torch.addmm(s.b, x, s.kn), True, True),
    "addmm_keywords": (lambda s, x: torch.addmm(s.b, mat1=x, mat2=s.nk.t()), False, True),
    "addmm_method": (lambda s, x: s.b.addmm(x, s.kn), True, True),
}


def _dynamo_graph(model: nn.Module, x: Tensor) -> fx.GraphModule:
    seen: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Tensor]:
        seen.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(x)
    return seen[0]


def _export_graph(model: nn.Module, x: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        return torch.export.export(model, (x,)).module()


CAPTURES = {"dynamo": _dynamo_graph, "fx": qfx.trace, "export": _export_graph}


@pytest.mark.parametrize("name, capture", every([*SPELLINGS, *SPELLINGS_2D], CAPTURES))
def test_spelling(name: str, capture: str) -> None:
    spelling, transposed, has_bias = {**SPELLINGS, **SPELLINGS_2D}[name]
    x = torch.randn(*(() if name in SPELLINGS_2D else (3,)), 5, K)
    model = Holder(spelling)
    gm = CAPTURES[capture](model, x)
    (site,) = match(gm)
    assert isinstance(site, Site), site
    assert (site.m, site.k, site.n) == (x.numel() // K, K, N)
    assert (site.view == (T,), site.bias is not None) == (transposed, has_bias)
    if capture == "dynamo":
        return  # its weights are graph inputs; the backend tests run them
    rewritten, plan = qfx.rewrite(gm, qfx.Config(scheme="w8a8-asymmetric", minimum_gain=0))
    assert plan.quantized == 1
    with torch.no_grad():
        error = (rewritten(x) - model(x)).abs().max()
    assert 0 < error <= 0.05 * K  # |x|, |w| stay below 5 here: (B2) with both scales below 5 / 127


def _reasons(function: Callable[..., Tensor], *inputs: Tensor) -> list[str]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b, self.conv = W_NK, BIAS, nn.Conv1d(K, N, 1)
            self.layer = nn.TransformerEncoderLayer(K, 2, K, batch_first=True).eval()
            self.wide = nn.Parameter(torch.zeros(1, 65793))
            self.frozen = nn.Parameter(torch.ones(N, K, dtype=torch.int64), requires_grad=False)

        def forward(self, *x: Tensor) -> Tensor:
            return function(self, *x)

    found: tuple[Match, ...] = ()

    def look(gm: fx.GraphModule, example: list[Tensor]) -> Callable[..., Tensor]:
        nonlocal found
        found = match(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(Model(), backend=look, fullgraph=True)(*inputs)
    assert all(isinstance(m, Unmatched) for m in found), found
    return [m.reason for m in found if isinstance(m, Unmatched)]


X2, X3 = torch.randn(5, K), torch.randn(3, 5, K)
REFUSALS = {
    "attention_with_dropout": (
        lambda s, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
        (X3,),
        "an attention with dropout",
    ),
    "attention_of_uneven_groups": (
        lambda s, x: F.scaled_dot_product_attention(
            x.repeat(2, 1, 1)[None], x[None], x[None, :1], enable_gqa=True
        ),
        (X3,),
        "an attention with different batches of queries and keys",
    ),
    "attention_of_fewer_axes": (
        lambda s, x: F.scaled_dot_product_attention(x, x[0], x[0]),
        (X3,),
        "an attention with different batches of queries and keys",
    ),
    "attention_mask": (
        lambda s, x: F.scaled_dot_product_attention(
            x.bfloat16(), x.bfloat16(), x.bfloat16(), x.bfloat16()[:, :, :5]
        ),
        (X3,),
        "an attention whose mask is bfloat16",
    ),
    "encoder_layer": (lambda s, x: s.layer(x), (X3,), "this operator with a matmul inside"),
    "inner": (lambda s, x: torch.inner(x, s.w), (X3,), "this operator with a matmul inside"),
    "computed_weight": (lambda s, x: F.linear(x, s.w * x.sum()), (X2,), "computed by mul"),
    "double": (
        lambda s, x: x @ s.w.t().double(),
        (X2.double(),),
        "the input is float64; int8 serves float32",
    ),
    "integer": (lambda s, x: x @ s.frozen.t(), (X2.long(),), "the input is int64"),
    "scaled_addmm": (lambda s, x: torch.addmm(s.b, x, s.w.t(), alpha=2), (X2,), "alpha=2"),
    "wide": (lambda s, x: F.linear(x, s.wide), (torch.zeros(2, 65793),), "K is above 65792"),
    "out": (lambda s, x: torch.matmul(x, s.w.t(), out=torch.empty(5, N)), (X2,), "into out="),
    "addmm_matrix": (
        lambda s, x: torch.addmm(torch.ones(5, N), x, s.w.t()),
        (X2,),
        "the added term has shape [5, 6]",
    ),
    "written_weight": (
        lambda s, x: F.linear(x, s.w.mul_(1)),
        (X2,),
        "computed by mul_",
    ),
    "weight_written_elsewhere": (
        lambda s, x: (s.w[0].zero_(), F.linear(x, s.w))[1],
        (X2,),
        "modified in place",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_has_its_reason(name: str) -> None:
    function, inputs, phrase = REFUSALS[name]
    reasons = _reasons(function, *inputs)
    assert reasons and phrase in reasons[-1], reasons


V, SQUARE = torch.randn(K), torch.randn(K, K)
INSIDE: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "inner": (torch.inner, (X2, X2)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=1), (SQUARE, SQUARE)),
    "addbmm": (torch.addbmm, (SQUARE, SQUARE[None], SQUARE[None])),
    "mv": (torch.mv, (SQUARE, V)),
    "addmv": (torch.addmv, (V, SQUARE, V)),
    "dot": (torch.dot, (V, V)),
    "vdot": (torch.vdot, (V, V)),
    "vecdot": (torch.linalg.vecdot, (X2, X2)),
    "outer": (torch.outer, (V, V)),
    "ger": (torch.ger, (V, V)),
    "addr": (torch.addr, (SQUARE, V, V)),
    "kron": (torch.kron, (SQUARE, SQUARE)),
    "cdist": (torch.cdist, (X2, X2)),
    "bilinear": (F.bilinear, (X2, X2, torch.randn(3, K, K))),
    "chain_matmul": (torch.chain_matmul, (SQUARE, SQUARE)),
    "multi_dot": (lambda a, b: torch.linalg.multi_dot([a, b, a]), (SQUARE, SQUARE)),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
def test_exported_operators_with_a_matmul_inside_are_told(name: str) -> None:
    function, inputs = INSIDE[name]

    class Calls(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return function(*inputs)

    gm = torch.export.export(Calls(), inputs).module()
    assert isinstance(gm, fx.GraphModule)
    reasons = [m.reason for m in match(gm) if isinstance(m, Unmatched)]
    assert any("with a matmul inside" in r for r in reasons), (reasons, gm.graph)


def _call(row: Activation, spelled: Any) -> Callable[[Tensor], Tensor]:
    if isinstance(spelled, str):
        return lambda y: getattr(y, spelled.removeprefix("."))(**row.settings)
    return lambda y: spelled(y, **row.settings)


EPILOGUES = {
    f"{name}_{number}": (_call(row, spelled), name)
    for name, row in ACTIVATIONS.items()
    for number, spelled in enumerate(row.spelled)
}
EPILOGUES |= {
    "relu_in_place": (lambda y: F.relu(y, inplace=True), "relu"),
    "gelu_by_default": (lambda y: F.gelu(y), "gelu"),
    "used_twice": (lambda y: F.relu(y) + y, "none"),
    "unknown": (lambda y: F.softplus(y), "none"),
    "silu_written_out": (lambda y: y * torch.sigmoid(y), "silu"),
    "silu_of_methods": (lambda y: y.sigmoid().mul(y), "silu"),
    "part_of_a_product": (lambda y: y * torch.sigmoid(y + 1), "none"),
    "another_factor": (lambda y: (y + 1) * torch.sigmoid(y), "none"),
    "read_elsewhere": (lambda y: y * torch.sigmoid(y) + y, "none"),
    "half_read_elsewhere": (lambda y: (s := torch.sigmoid(y)) * y + s, "none"),
    "with_options": (lambda y: y * torch.sigmoid(y, out=None), "none"),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogue(name: str) -> None:
    function, expected = EPILOGUES[name]
    gm = _dynamo_graph(Holder(lambda s, x: function(F.linear(x, s.nk, s.b))), X2)
    (site,) = match(gm)
    assert isinstance(site, Site) and site.activation == expected


@pytest.mark.parametrize("capture, name", every(CAPTURES, list(ACTIVATIONS)[1:]))
def test_activation(name: str, capture: str) -> None:
    """As its reference and as its module, which all that one call spells have."""
    row = ACTIVATIONS[name]
    models: list[nn.Module] = [Holder(lambda s, x: row.reference(F.linear(x, s.nk, s.b)))]
    if row.spelled:
        assert row.module is not None
        models.append(nn.Sequential(nn.Linear(K, N), row.module(**row.settings)))
    for model in models:
        (site,) = match(CAPTURES[capture](model, X2))
        assert isinstance(site, Site) and site.activation == name


def _written_bias(s: Holder, x: Tensor) -> Tensor:
    y = x @ s.kn
    s.b.add_(1)
    return y + s.b


# Sums with a constant that is no bias of the matmul before.
ADDED: dict[str, Callable[..., Tensor]] = {
    "written in place": _written_bias,
    "of another type": lambda s, x: x.bfloat16() @ s.kn.bfloat16() + s.b,
    "of one element": lambda s, x: x @ s.kn + s.b[:1],
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_no_bias_is_not_absorbed(name: str) -> None:
    (site,) = match(_dynamo_graph(Holder(ADDED[name]), X2))
    assert isinstance(site, Site) and site.bias is None


def _library_operator() -> torch.library.CustomOpDef:
    @torch.library.custom_op("qfx_tests::project", mutates_args=())
    def project(bias: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
        return x @ matrix + bias

    project.register_fake(lambda bias, x, matrix: x.new_empty(*x.shape[:-1], matrix.shape[1]))
    return project


def test_a_registered_operator_is_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfx.match.spellings.TABLE", dict(spellings.TABLE))
    project = _library_operator()
    gm = _dynamo_graph(Holder(lambda s, x: F.relu(project(s.b, x, s.kn))), X2)
    (unmatched,) = match(gm)
    assert isinstance(unmatched, Unmatched) and "is not PyTorch's" in unmatched.reason
    qfx.register_matmul(torch.ops.qfx_tests.project, ("bias", "x", "w"), weight="kn")
    (site,) = match(gm)
    assert isinstance(site, Site)
    assert (site.k, site.n, site.view, site.activation) == (K, N, (T,), "relu")
    with pytest.raises(ValueError, match=r"qfx_tests.project is known already"):
        qfx.register_matmul(torch.ops.qfx_tests.project)


@pytest.mark.parametrize(("names", "weight"), [(("x", "y"), "nk"), (("x", "w"), "nn")])
def test_a_wrong_registration_is_refused(names: tuple[str, ...], weight: str) -> None:
    with pytest.raises(ValueError, match="expected x, w and perhaps bias in the order"):
        qfx.register_matmul(len, names, weight=weight)
