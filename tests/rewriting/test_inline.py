"""On a GPU quantization becomes aten operators: the same bits, one for all readers, as graphs whose
tensors are said to be on a GPU and that run on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import qfx
from qfx.ops.code import Code
from qfx.rewriting.aten_quantization import quantize_parts
from tests.cuda import emulator as cuda_emulator
from tests.cuda.graphs import as_if_built, on_cuda
from tests.lib import strategies as more
from tests.lib.pairs import every

OPS = torch.ops.qfx


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_built(monkeypatch)


def _equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        assert torch.equal(g.nan_to_num(nan=-7.0), e.nan_to_num(nan=-7.0))
        assert torch.equal(g.isnan(), e.isnan())


# --- laws: the same bits as the operator ---


@given(
    rows=more.POSITIVE, columns=more.POSITIVE, seed=more.SEEDS, dtype=more.DTYPES, code=more.CODES,
    fill=st.sampled_from(more.FINITE + more.FAULTY), smoothed=st.booleans(),
)  # fmt: skip
def test_inlined_quantize_is_quantize(
    rows: int,
    columns: int,
    seed: int,
    dtype: torch.dtype,
    code: Code,
    fill: str,
    smoothed: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = more.filled(fill, rows, columns, generator).to(dtype)
    factor = torch.rand(columns, generator=generator) + 0.5 if smoothed else None
    arguments = (x, code, None, None, None, factor)
    _equal(quantize_parts(*arguments), OPS.quantize(*arguments))


@given(
    rows=more.POSITIVE, columns=more.POSITIVE, seed=more.SEEDS, bits=more.BITS,
    scale=st.sampled_from([0.0, 1e-40, 0.02, 3.0, 1e38, torch.inf, torch.nan]),
    zero=st.sampled_from([None, -200, 0, 3]), fill=st.sampled_from(more.FINITE + more.FAULTY),
)  # fmt: skip
def test_inlined_quantize_by_a_scale_is_quantize(
    rows: int, columns: int, seed: int, bits: int, scale: float, zero: int | None, fill: str
) -> None:
    x = more.filled(fill, rows, columns, torch.Generator().manual_seed(seed))
    point = None if zero is None else torch.tensor([zero], dtype=torch.int32)
    arguments = (x, Code(bits, int(zero is None)), torch.tensor([scale]), point)
    _equal(quantize_parts(*arguments), OPS.quantize(*arguments))


# --- graphs ---


class Shared(nn.Module):
    """q and k read a norm's output, o what an activation returns."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.q, self.k = nn.Linear(64, 32), nn.Linear(64, 32, bias=False)
        self.o = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (64,))
        return self.o(self.activation(self.q(x)) * self.k(x))


X = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))


def _fused(module: nn.Module, x: Tensor, scheme: str | qfx.Scheme, **more: bool) -> fx.GraphModule:
    gm = on_cuda(qfx.trace(module, x))
    return qfx.rewrite(gm, qfx.Config(scheme=scheme, minimum_gain=0), **more)[0]


def _operators(gm: fx.GraphModule) -> Counter[str]:
    """How often each operator of qfx is called."""
    names = (str(n.target) for n in gm.graph.nodes if n.op == "call_function")
    return Counter(n.split(".")[1] for n in names if n.startswith("qfx."))


GROUPS4 = qfx.Scheme(x=qfx.QSpec(symmetric=False), w=qfx.QSpec(bits=4, symmetric=False, group=64))
SCHEMES = (
    "w8a8", "w8a8-asymmetric", "w8a8-symmetric", GROUPS4, qfx.Scheme(x=qfx.QSpec(axes=(0, 1))),
    qfx.Scheme(x=None),
)  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@torch.no_grad()
def test_the_graph_for_a_gpu_gives_the_same_bits(scheme: str | qfx.Scheme) -> None:
    module = Shared()
    config = qfx.Config(scheme=scheme, minimum_gain=0)
    canonical, _ = qfx.rewrite(qfx.trace(module, X), config, canonical=True)
    assert torch.equal(_fused(module, X, scheme)(X), canonical(X))


ROTATED_GROUPS = qfx.Scheme(w=qfx.QSpec(group=64), rotation=64)


@pytest.mark.parametrize(
    ("scheme", "operators"),
    [
        ("w8a8-asymmetric", {"linear": 3}),
        ("w8a8", {"quantize": 1, "linear": 2, "linear_dynamic": 1}),  # rotated
        (GROUPS4, {"linear": 3}),
        (ROTATED_GROUPS, {"quantize": 1, "linear": 2, "linear_dynamic": 1}),
    ],
)
@torch.no_grad()
def test_what_rotates_stays_an_operator(
    scheme: str | qfx.Scheme, operators: dict[str, int]
) -> None:
    assert _operators(_fused(Shared(), X, scheme)) == operators


@torch.no_grad()
def test_one_quantization_for_all_readers() -> None:
    gm = _fused(Shared(), X, "w8a8-symmetric")
    q, k, _ = gm.graph.find_nodes(op="call_function", target=OPS.linear.default)
    assert q.args[:3] == k.args[:3]


@torch.no_grad()
def test_one_row_that_rotates_is_quantized_once() -> None:
    """Each quantization is a launch, which takes longer than a row."""
    operators = _operators(_fused(Shared(), X[:1, :1], "w8a8"))
    assert operators == {"quantize": 1, "linear": 2, "linear_dynamic": 1}


def test_training_reads_inlined_codes() -> None:
    module = Shared()
    gm = _fused(module, X, "w8a8-symmetric", training=True)
    config = qfx.Config(scheme="w8a8-symmetric", minimum_gain=0)
    expected, _ = qfx.rewrite(qfx.trace(module, X), config, training=True)
    assert _operators(gm) == {"pack_weight": 3, "linear_ste": 3}
    gradients = []
    for each in (gm, expected):
        each(X).square().sum().backward()
        gradients.append([p.grad for p in each.parameters()])
    assert len(gradients[0]) == 5
    for got, wanted in zip(*gradients, strict=True):
        assert got is not None and torch.equal(got, wanted)


def test_the_seed_of_an_int8_backward_lies_beside_its_input() -> None:
    """An operator whose operands are on two devices runs nowhere."""
    module = Shared()
    for gm, device in ((on_cuda(qfx.trace(module, X)), "cuda"), (qfx.trace(module, X), "cpu")):
        config = qfx.Config(scheme="w8a8-asymmetric", backward="int8", minimum_gain=0)
        made, _ = qfx.rewrite(gm, config, training=True)
        seeds = made.graph.find_nodes(op="call_function", target=torch.randint)
        assert [seed.kwargs["device"].type for seed in seeds] == [device] * 3


@pytest.mark.parametrize("axes", [(1,), (0, 1)])
@torch.no_grad()
def test_a_size_that_may_be_zero(axes: tuple[int, ...]) -> None:
    """One range of no rows cannot be reduced, one for each of them can."""

    class Chosen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x[:, 0] > 0])

    module, x = Chosen(64, 8), X.reshape(-1, 64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    config = qfx.Config(scheme=qfx.Scheme(x=qfx.QSpec(axes=axes)), minimum_gain=0)
    gm, _ = qfx.rewrite(on_cuda(program.module()), config)
    assert _operators(gm)["linear"] == (axes == (1,))
    for inputs in (x, -x.abs()):
        assert torch.allclose(gm(inputs), module(inputs), atol=0.1)


@pytest.mark.parametrize("x", [torch.ones(0, 64), torch.ones(3, 0)])
@torch.no_grad()
def test_of_nothing_no_range_is_reduced(x: Tensor) -> None:
    module = nn.Linear(x.shape[-1], 8)
    gm = _fused(module, x, "w8a8-asymmetric")
    assert torch.equal(gm(x), module(x))


@pytest.mark.parametrize("symmetric", [False, True])
def test_inductor_keeps_the_bits(symmetric: bool) -> None:
    """Inductor for the CPU; for a GPU `addcdiv` is what it divides exactly by."""
    arguments = (X, Code(8, int(symmetric)))
    compiled = torch.compile(quantize_parts, fullgraph=True)
    _equal(compiled(*arguments), OPS.quantize(*arguments))


# --- with the CUDA operators, on the emulator ---


def _on_emulator(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with CUDA's operators and layout of weights, as the emulator has them."""
    for node in gm.graph.nodes:
        if str(node.target).startswith("qfx."):
            node.target = getattr(
                cuda_emulator.OPS, node.target._schema.name.split("::")[1]
            ).default
        elif node.op == "get_attr" and node.target.endswith("_weight"):
            setattr(gm, node.target, cuda_emulator.cuda_packed(getattr(gm, node.target)))
    gm.recompile()
    return gm


@pytest.mark.parametrize("scheme, capability", every(SCHEMES[:-1], [75, 90]), ids=str)
@torch.no_grad()
def test_cuda_operators_give_the_same_bits(scheme: str | qfx.Scheme, capability: int) -> None:
    cuda_emulator.library()
    cuda_emulator.emulate(capability)
    fused = _fused(Shared(F.relu), X, scheme)  # of silu each has its own approximation
    expected = fused(X)
    on_emulator = _on_emulator(fused)
    assert not _operators(on_emulator)
    assert torch.equal(on_emulator(X), expected)
