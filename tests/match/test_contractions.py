"""Einsums, convolutions, left weights, views of weights: one matmul each, the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.match.base import Unmatched
from qfx.match.matching import match
from qfx.match.site import Site
from qfx.ops.single_tensors import sqnr
from tests.lib.models import compiled
from tests.lib.pairs import LONG

K, N = 8, 6


class Weights(nn.Module):
    """Parameters of many shapes, and the contraction under test as its forward."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=g))

        self.nk, self.kn, self.b = parameter(N, K), parameter(K, N), parameter(N)
        self.heads, self.qkv = parameter(2, 3, K), parameter(3 * N, K)
        self.batched = parameter(4, K, N)
        self.experts, self.split = parameter(4, N, K), parameter(2, 4, N)
        self.c1, self.c2 = parameter(N, K, 1), parameter(N, 3, 2, 4)
        self.t1, self.t2 = parameter(K, N, 5), parameter(K, N, 2, 4)
        self.c3 = parameter(N, 2, 3, 2, 3)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


# name -> (function, shape of x)
Case = tuple[Callable[..., Tensor], tuple[int, ...]]
CASES: dict[str, Case] = {
    "einsum_linear": (lambda s, x: torch.einsum("bsk,nk->bsn", x, s.nk), (2, 5, K)),
    "einsum_list": (lambda s, x: torch.einsum("bsk,nk->bsn", [x, s.nk]), (2, 5, K)),
    "einsum_kn": (lambda s, x: torch.einsum("b s k, k n -> b s n", x, s.kn), (2, 5, K)),
    "einsum_weight_first": (lambda s, x: torch.einsum("nk,bk->bn", s.nk, x), (5, K)),
    "einsum_weight_first_output_too": (lambda s, x: torch.einsum("nk,bk->nb", s.nk, x), (5, K)),
    "einsum_k_in_front": (lambda s, x: torch.einsum("kbs,nk->nbs", x, s.nk), (K, 2, 5)),
    "einsum_heads": (lambda s, x: torch.einsum("bsk,hdk->bhsd", x, s.heads), (2, 5, K)),
    "einsum_two_sums": (lambda s, x: torch.einsum("bhsd,hdn->bsn", x, s.split), (2, 2, 5, 4)),
    "einsum_ellipsis": (lambda s, x: torch.einsum("...k,nk->...n", x, s.nk), (2, 3, 4, K)),
    "conv1d": (lambda s, x: F.conv1d(x, s.c1, s.b), (2, K, 5)),
    "conv1d_stride": (lambda s, x: F.conv1d(x, s.c1, stride=2), (2, K, 5)),
    "conv2d_patches": (lambda s, x: F.conv2d(x, s.c2, s.b, stride=(2, 4)), (2, 3, 6, 8)),
    "conv2d_patches_left_over": (lambda s, x: F.conv2d(x, s.c2, stride=(3, 4)), (2, 3, 7, 11)),
    "conv2d_channels_last": (
        lambda s, x: F.conv2d(
            x.contiguous(memory_format=torch.channels_last), s.c1[..., None], s.b
        ),
        (2, K, 3, 5),
    ),
    "conv_keywords": (
        lambda s, x: F.conv1d(input=x, weight=s.c1, bias=s.b, padding="valid"),
        (2, K, 5),
    ),
    "conv_same": (lambda s, x: F.conv2d(x, s.c1[..., None], s.b, padding="same"), (2, K, 3, 5)),
    "conv_same_dilated": (lambda s, x: F.conv1d(x, s.c1, None, 1, "same", 2), (2, K, 5)),
    "conv_then_view": (lambda s, x: F.conv1d(x, s.c1).view(2, -1), (2, K, 5)),
    "conv_then_relu": (lambda s, x: F.relu(F.conv1d(x, s.c1)), (2, K, 5)),
    "conv_overlap": (lambda s, x: F.conv2d(x, s.c2, s.b), (2, 3, 6, 8)),
    "conv_padding": (lambda s, x: F.conv1d(x, s.c1, s.b, padding=1), (2, K, 5)),
    "conv_same_uneven": (lambda s, x: F.conv2d(x, s.c2, padding="same"), (2, 3, 6, 8)),
    "conv_dilation": (
        lambda s, x: F.conv2d(x, s.c2, stride=(3, 4), dilation=(2, 1)),
        (2, 3, 6, 8),
    ),
    "conv_overlap_channels_last": (
        lambda s, x: F.conv2d(x.contiguous(memory_format=torch.channels_last), s.c2, s.b).relu(),
        (2, 3, 6, 8),
    ),
    "conv3d_overlap": (lambda s, x: F.conv3d(x, s.c3, s.b, padding=(1, 0, 1)), (2, 2, 4, 5, 3)),
    "transposed": (lambda s, x: F.conv_transpose1d(x, s.t1, s.b), (2, K, 5)),
    "transposed_phases": (
        lambda s, x: F.conv_transpose1d(x, s.t1, s.b, stride=2, padding=1, output_padding=1),
        (2, K, 5),
    ),
    "transposed_2d": (
        lambda s, x: F.conv_transpose2d(x, s.t2, s.b, stride=(2, 3), padding=(0, 1)),
        (2, K, 4, 5),
    ),
    "transposed_2d_channels_last": (
        lambda s, x: F.conv_transpose2d(
            x.contiguous(memory_format=torch.channels_last), s.t2, None, stride=2, padding=1
        ),
        (2, K, 4, 5),
    ),
    "left": (lambda s, x: s.nk @ x, (2, K, 5)),
    "left_transposed": (lambda s, x: torch.matmul(s.kn.t(), x), (K, 5)),
    "left_plus_column": (lambda s, x: s.nk @ x + s.b[:, None], (2, K, 5)),
    "left_then_view": (lambda s, x: (s.nk @ x).view(-1), (2, K, 5)),
    "rmatmul": (lambda s, x: s.kn.__rmatmul__(x), (5, K)),
    "linalg": (lambda s, x: torch.linalg.matmul(x, s.kn), (2, 5, K)),
    "chunk": (lambda s, x: F.linear(x, s.qkv.chunk(3)[1]), (5, K)),
    "rows": (lambda s, x: F.linear(x, s.qkv[N : 2 * N]), (5, K)),
    "split": (lambda s, x: x @ s.qkv.split([N, 2 * N])[1].t(), (5, K)),
    "expert": (lambda s, x: F.linear(x, s.experts[2]), (5, K)),
    "expert_rows": (lambda s, x: F.linear(x, s.experts[2, 1:4]), (5, K)),
    "expert_unbound": (lambda s, x: x @ s.experts.unbind(0)[3].mT, (5, K)),
    "reshaped": (lambda s, x: F.linear(x, s.experts.view(4 * N, K)), (5, K)),
    "cast": (lambda s, x: F.linear(x.bfloat16(), s.nk.to(torch.bfloat16)).float(), (5, K)),
    "cast_to_itself": (lambda s, x: F.linear(x, s.nk.type(torch.float32)), (5, K)),
}


def _x(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CASES)
def test_inference(name: str) -> None:
    """Int8, of the same shape and strides as eager's result, which views behind it may rely on."""
    run, shape = CASES[name]
    model, x = Weights(run), _x(shape)
    report = qfx.explain(model, x, options={"minimum_gain": 0})
    assert (report.quantized, report.total) == (1, 1), report
    with torch.no_grad():
        expected, got = model(x), compiled(model)(x)
    assert got.stride() == expected.stride() and got.dtype == expected.dtype
    assert 25 < sqnr(expected, got) < 70


def test_a_weight_is_packed_as_it_is_cast() -> None:
    x, outputs = _x((5, K)), []
    for dtype in (torch.float32, torch.bfloat16):  # cast in the graph, or before
        model = Weights(lambda s, x: F.linear(x.bfloat16(), s.nk.to(torch.bfloat16))).to(dtype)
        with torch.no_grad():
            outputs.append(compiled(model)(x))
    assert torch.equal(*outputs)


# What follows is of what was matched, and each of the cases is in one of the two.
HALVES = (list(CASES), list(CASES)) if LONG else (list(CASES)[::2], list(CASES)[1::2])


@pytest.mark.parametrize("name", HALVES[0])
def test_training(name: str) -> None:
    run, shape = CASES[name]
    model = Weights(run)
    gradients = []
    for function in (model, compiled(model, inner="aot_eager")):
        x = _x(shape).requires_grad_()
        model.zero_grad()
        function(x).square().sum().backward()
        found = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
        gradients.append(torch.cat([g.flatten() for g in found]))
    assert 20 < sqnr(*gradients) < 70


@pytest.mark.parametrize("name", HALVES[1])
def test_symbolic_and_exported_graphs(name: str) -> None:
    run, shape = CASES[name]
    model, x = Weights(run), _x(shape)
    for gm in (qfx.trace(model, x), torch.export.export(model, (x,)).module()):
        rewritten, plan = qfx.rewrite(gm, qfx.Config(minimum_gain=0))
        assert plan.quantized == 1, plan
        with torch.no_grad():
            assert 25 < sqnr(model(x), rewritten(x)) < 70


def test_dynamic_sizes() -> None:
    """One compilation serves all batch sizes and lengths."""
    for name in ("einsum_heads", "conv2d_patches", "conv_overlap", "transposed_phases", "left"):
        run, shape = CASES[name]
        model = Weights(run)
        f = torch.compile(
            model, backend=qfx.backend, dynamic=True, options={"minimum_gain": 0, "inner": "eager"}
        )
        with torch.no_grad():
            for batch in (2, 3, 5):
                x = torch.randn(batch, *shape[1:])
                assert 25 < sqnr(model(x), f(x)) < 70


REFUSED: dict[str, tuple[Callable[..., Any], tuple[int, ...], str]] = {
    "trace": (lambda s, x: torch.einsum("bkk,nk->bn", x, s.nk), (2, K, K), "no matmul"),
    "outer": (lambda s, x: torch.einsum("b,nk->bnk", x, s.nk), (3,), "no matmul"),
    "sum": (lambda s, x: torch.einsum("bsk,nk->bn", x, s.nk), (2, 5, K), "sums an axis"),
    "batches": (lambda s, x: x @ s.batched, (1, 5, K), "with different batches"),
    "three": (lambda s, x: torch.einsum("bk,nk,n->bn", x, s.nk, s.b), (5, K), "3 operands"),
    "implicit": (lambda s, x: torch.einsum("bk,nk", x, s.nk), (5, K), "explicit output"),
    "broadcast": (lambda s, x: torch.einsum("bk,nk->bn", x, s.nk), (5, 1), "may broadcast an axis"),
    "groups": (lambda s, x: F.conv1d(x, s.c1[:, :4], groups=2), (2, K, 5), "in 2 groups"),
    "vector": (lambda s, x: s.nk @ x, (K,), "times a vector"),
    "two_weights": (lambda s, x: x + s.nk @ s.kn, (N, N), "not a tensor|constant"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    run, shape, reason = REFUSED[name]
    matches = match(qfx.trace(Weights(run), _x(shape)))
    if name == "two_weights":  # the left one serves as an activation
        assert all(isinstance(m, Site) for m in matches)
        return
    assert [isinstance(m, Unmatched) and reason in m.reason for m in matches] == [True], matches
