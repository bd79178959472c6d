"""What is packed is what the scheme says: codes, scales, and the gradients that they give."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations

import pytest
import torch

import qfx
from qfx import PER_COLUMN, PER_TENSOR, QSpec
from qfx.ops import REFERENCES
from qfx.ops.packing import Packing, parts_of
from qfx.ops.storage import Values, values_of
from qfx.weights.cache import Packed, pack
from tests.conftest import same_bits
from tests.lib.bounds import U32
from tests.lib.models import compiled
from tests.lib.pairs import covering, values
from tests.rewriting.test_schemes import ROWS, TRAINED, VARIED, Alone, Case, K, N, Row


def _of_weight(row: Row) -> list[Hashable]:
    """Every two properties of the weight's codes."""
    more = {"rotation": row.scheme.rotation, "factor": row.factor, "outliers": row.outliers}
    return list(combinations((values(row.scheme.w) | more).items(), 2))


def _values(packed: Packed, case: Case) -> Values:
    return values_of(packed.weight, case.scheme.w, case.scheme.group, N, K)


def _packed(case: Case) -> tuple[Packing, Packed]:
    factor = None if case.given is None else tuple(case.given.tolist())
    how = (case.scheme.w, factor, case.scheme.block(K), case.outliers)
    packing = Packing(*how, group=case.scheme.group)
    return packing, pack(case.model.weight, (), packing)


@pytest.mark.parametrize("row", covering(ROWS, _of_weight), ids=str)
def test_codes_are_those_of_the_transformed_weight(row: Row) -> None:
    """As qfx.quantize makes them: what shares a scale has one. (R1)-(R3)"""
    case, spec = Case(row, torch.float32), row.scheme.w
    packing, packed = _packed(case)
    plain = case._kept(case.model.weight).float() / case.factor.float()
    turned = REFERENCES["rotate"](plain, None, packing.rotation)
    shared = QSpec(bits=spec.bits, axes=PER_TENSOR) if spec.axes == PER_COLUMN else spec
    expected = qfx.quantize(turned, shared)
    values = _values(packed, case)
    assert torch.equal(values.codes, expected.codes)
    scales = values.scale.reshape(N, -1)
    assert same_bits(scales.contiguous(), expected.scale.expand(scales.shape).contiguous())
    assert (values.zero_point is None) == spec.symmetric
    if values.zero_point is not None:
        assert torch.equal(values.zero_point, expected.zero_point)


@pytest.mark.parametrize("row", VARIED, ids=str)
def test_a_graph_packs_weights_as_the_cache_does(row: Row) -> None:
    case = Case(row, torch.float32)
    packing, expected = _packed(case)
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    names = ("w", *packing.constants())
    w, *rest = (torch.fx.Proxy(graph.placeholder(name), tracer) for name in names)
    parts = parts_of(w, packing, dict(zip(names[1:], rest, strict=True)), K)
    graph.output(tuple(parts[part].node for part in packing.parts))
    constants = [constant.tensor() for constant in packing.constants().values()]
    found = torch.fx.GraphModule({}, graph)(case.model.weight.detach(), *constants)
    assert all(same_bits(a, b) for a, b in zip(found, expected.tensors, strict=True))


@pytest.mark.parametrize(("row", "frozen"), TRAINED, ids=str)
def test_the_gradient_of_x_is_that_of_the_packed_weight(row: Row, frozen: bool) -> None:
    """dx = factor R^T (G w^), within the roundings of the product and of R. (T1) (R1)"""
    case = Case(row, torch.float32)
    model, x, g = Alone(case.model), case.x.clone().requires_grad_(), torch.randn(5, N)
    model.linear.weight.requires_grad_(not frozen)
    compiled(model, **case.options)(x).backward(g)
    _, packed = _packed(case)
    values = _values(packed, case)
    codes = values.codes - (0 if values.zero_point is None else _in_k(values.zero_point, case))
    w_hat, back = codes.double() * _in_k(values.scale.double(), case), case.turn.t()
    expected = g.double() @ w_hat @ back * case.factor
    bound = (N + 32) * U32 * (g.double().abs() @ w_hat.abs() @ back.abs() * case.factor)
    assert x.grad is not None and ((x.grad.double() - expected).abs() <= bound).all()


def _in_k(values: torch.Tensor, case: Case) -> torch.Tensor:
    """Of rows or groups, as values of elements [N, K]."""
    return values.reshape(N, -1).repeat_interleave(case.scheme.w.group or K, 1)[:, :K]
