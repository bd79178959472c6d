"""saved_activations="int8": the forms in which activations are saved, which of them are, and that
the gradients of compiled steps are unbiased estimates."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._inductor.utils import fresh_cache
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import qfx
from qfx.rewriting.saved_forms import CallEmitter, form_of, order_in_memory

X = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


def _packed_and_back(tensor: Tensor) -> tuple[Tensor, list[Tensor]] | None:
    """What the two graphs of a form make of a tensor: the tensor again, and what was saved."""
    with FakeTensorMode() as mode:
        like = mode.from_tensor(tensor)
    form = form_of(like)
    if form is None:
        return None
    forward, backward = fx.Graph(), fx.Graph()
    node = forward.placeholder("x")
    node.meta["val"] = like
    packed = form.pack(CallEmitter(forward.output([]), "x_saved"), node)
    forward.output_node().args = (packed,)
    inputs = [backward.placeholder(part.name) for part in packed]
    for made, part in zip(inputs, packed, strict=True):
        made.meta["val"] = part.meta["val"]
    end = backward.output([])
    end.args = (form.unpack(CallEmitter(end, "x_read"), inputs, like),)
    assert all(n.meta["val"].is_contiguous() for n in packed)
    saved = fx.GraphModule({}, forward)(tensor)
    return fx.GraphModule({}, backward)(*saved), saved


@given(
    st.permutations(range(3)),
    st.sampled_from([(1, 64, 64), (3, 40, 48), (2, 33, 64), (96, 1, 48), (8, 16, 32)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.bool]),
    st.integers(0, 2**32),
)
def test_a_form_keeps_sizes_strides_and_values(
    axes: list[int], shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    values = torch.randn(shape) * torch.logspace(-6, 2, shape[1])[:, None]
    x = (values > 0 if dtype == torch.bool else values.to(dtype)).permute(axes)
    found, saved = _packed_and_back(x) or (None, [])
    if found is None:
        assert values.numel() < 4096 or (dtype == torch.bool and values.numel() % 8)
        return
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert all(n == 1 or found.stride(i) == x.stride(i) for i, n in enumerate(x.shape))
    if dtype == torch.bool:
        assert torch.equal(found, x) and saved[0].numel() * 8 == x.numel()
        return
    rows = x.permute(order_in_memory(x)).double()  # type: ignore[arg-type]
    step = rows.abs().amax(-1, keepdim=True) / 127
    error = (found.permute(order_in_memory(x)).double() - rows).abs()  # type: ignore[arg-type]
    rounded = torch.finfo(dtype).eps * rows.abs().amax(-1, keepdim=True)
    tiny = torch.finfo(dtype).tiny if dtype == torch.float16 else 0  # its smallest are not normal
    assert (error <= step * (1 + 1e-5) + rounded + tiny).all()
    assert saved[0].dtype == torch.int8 and saved[1].numel() == rows[..., 0].numel()


@pytest.mark.parametrize(
    "x",
    [
        X.expand(3, 64, 128),
        X[:, ::2],
        X[:40, :96],
        X[:8],
        X.reshape(-1, 16),
        X.ravel(),
        X.double(),
        X.to(torch.int32),
        (X > 0)[:, :127].clone().ravel()[: 4096 + 4].reshape(2, -1),
    ],
)
def test_what_has_no_form(x: Tensor) -> None:
    with FakeTensorMode() as mode:
        assert form_of(mode.from_tensor(x)) is None


def test_values_that_are_not_finite_stay_so() -> None:
    x = X.clone()
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    found, _ = _packed_and_back(x) or (x, [])
    assert found[3].isnan().all() and not found[4].isfinite().any()
    assert found[[0, 1, 2, 5]].isfinite().all()


class Step(nn.Module):
    """A function between two linears that stay float."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(128, 128), nn.Linear(128, 128)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x))).square().sum()


def gradients(run: Callable[..., Tensor], model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    model.zero_grad()
    run(x).backward()
    return torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(  # type: ignore[return-value]
        model, backend="qfx", options={"skip": ["*"], "saved_activations": "int8", **options}
    )


@pytest.fixture
def coded(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], int]]:
    """Yields a function: how many tensors became codes or bits since its last call."""
    caplog.set_level(logging.INFO, "qfx.rewriting.saved_activations")

    def count() -> int:
        records = [r for r in caplog.records if r.name == "qfx.rewriting.saved_activations"]
        found = sum(r.args[0] for r in records)  # type: ignore[index, misc]
        caplog.clear()
        return found

    with fresh_cache():  # a cached graph is not divided again
        yield count


SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "product": lambda x: x * x.flip(0),
    "square": torch.square,
    "norm": lambda x: F.layer_norm(x, (128,)),
    "rms norm": lambda x: F.rms_norm(x, (128,)),
    "matmul": lambda x: x @ x.t() @ x,
    "numerator": lambda x: x / 3 * x,
    "conversion": lambda x: x.bfloat16().float() * x,
    "checkpoint": lambda x: checkpoint(torch.square, x, use_reentrant=False),  # type: ignore[return-value]
}


class Sum(nn.Module):
    """All of them, each between linears of its own: one graph takes less time to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(map(Step, SMOOTH.values()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([step(x) for step in self.steps]).sum()


def test_what_reads_smoothly_is_coded(coded: Callable[[], int]) -> None:
    """All of it: floats are scales, and means and variances of rows."""
    model = Sum()
    found = []
    run = compiled(model)
    for each in (model, run):
        gradients(each, model, X)
        found.append([torch.cat([p.grad.ravel() for p in s.parameters()]) for s in model.steps])
    assert coded() > 2 * len(SMOOTH)
    for name, exact, noisy in zip(SMOOTH, *found, strict=True):
        assert torch.cosine_similarity(exact, noisy, 0) > 0.999, name
        assert not torch.equal(exact, noisy), name
    sizes = Counter[bool]()
    for row in qfx.saved_tensors(run, X).rows:
        sizes[row.dtype.is_floating_point] += row.bytes
    assert sizes[True] < 0.1 * sizes[False]


def again(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function, computed again in the backward pass."""
    return lambda x: checkpoint(function, x, use_reentrant=False)  # type: ignore[return-value]


ROUGH: dict[str, Callable[[Tensor], Tensor]] = {
    "divisor": lambda x: 1 / (x + 9),
    "root": lambda x: (x.abs() + 1).sqrt(),
    "power": lambda x: (x.abs() + 1) ** 0.7,
    "inverse power": lambda x: (x.abs() + 1) ** -1.0,
    "logarithm": lambda x: (x.abs() + 1).log(),
    "exponential": lambda x: x.exp(),
    "exponential of a multiple": lambda x: (x * 3).exp(),
    "divisor of a product": lambda x: x / (x * x + 1e-3),
    "root of a square": lambda x: (x.square() + 1e-4).sqrt(),
    "inverse root of a square": lambda x: x * (x.square() + 1e-4).rsqrt(),
    "exponential of a square": lambda x: torch.exp(-50 * x**2),
    "sum as a divisor": again(lambda x: x / x.sum(-1, keepdim=True)),
    "logarithm of a sum of two squares": again(
        lambda x: (x.pow(2).view(64, 2, 64).sum(1) + 1e-9).log()
    ),
    "logarithm of a sum of one square": again(
        lambda x: (x.pow(2).view(64, 128, 1).sum(-1) + 1e-6).log()
    ),
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "sine": torch.sin,
    "log softmax": lambda x: F.log_softmax(x, -1),
    "relu": F.relu,
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
}  # fmt: skip


@pytest.mark.usefixtures("coded")  # its caches
def test_what_does_not_read_smoothly_is_saved_as_it_is() -> None:
    """The gradient of each x, through a product, which is saved, and one function. What is
    compared is saved as bits, without a loss."""
    turned = torch.linalg.qr(torch.randn(128, 128)).Q

    def step(*xs: Tensor) -> Tensor:
        sums = [f(x @ turned).sum() for f, x in zip(ROUGH.values(), xs, strict=True)]
        return torch.stack(sums).sum()

    found = []
    for saved in ("float", "int8"):
        xs = [X.clone().requires_grad_() for _ in ROUGH]
        torch._dynamo.reset()
        options = {"saved_activations": saved, "skip": ["*"]}
        torch.compile(step, backend="qfx", options=options)(*xs).backward()
        found.append([x.grad for x in xs])
    assert [name for name, *pair in zip(ROUGH, *found, strict=True) if not torch.equal(*pair)] == []


def test_inverse_deviations_keep_their_values() -> None:
    """They span orders of magnitude: a group of channels is nearly zero."""
    torch.manual_seed(0)
    conv, r = nn.Conv2d(16, 64, 1, bias=False), torch.randn(128, 64, 8, 8)
    x, gate = torch.randn(128, 16, 8, 8), torch.ones(1, 64, 1, 1)
    gate[:, :2] = 1e-3

    def step(x: Tensor) -> Tensor:
        return (F.group_norm(F.conv2d(x, conv.weight) * gate, 32) * r).sum()

    torch._dynamo.reset()
    run = torch.compile(step, backend="qfx", options={"saved_activations": "int8", "skip": ["*"]})
    of = [x.requires_grad_(), conv.weight]
    for one, other in zip(*(torch.autograd.grad(f(x), of) for f in (step, run)), strict=True):
        assert torch.cosine_similarity(one.ravel(), other.ravel(), 0) > 0.99


def test_masks_of_dropout_are_bits_without_a_loss(coded: Callable[[], int]) -> None:
    def step(x: Tensor) -> Tensor:
        return F.dropout(x, 0.25)

    run = torch.compile(step, backend="qfx", options={"saved_activations": "int8"})
    x = X.clone().requires_grad_()
    y = run(x)
    y.sum().backward()
    assert coded() == 1
    assert torch.equal(x.grad, (y != 0) / 0.75) and 0.6 < (y != 0).float().mean() < 0.9


def test_the_mean_over_seeds_is_the_gradient() -> None:
    """Of linears, whose gradients are linear in what is saved; z < 5."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 32))
    run = compiled(model)

    def step(x: Tensor) -> Tensor:
        return run(x).square().sum()

    exact = gradients(lambda x: model(x).square().sum(), model, X).double()
    runs = torch.stack([gradients(step, model, X, seed) for seed in range(200)]).double()
    assert torch.equal(runs[7].float(), gradients(step, model, X, 7))
    error = (runs.mean(0) - exact).abs()
    assert (error <= 5 * runs.std(0) / 200**0.5 + 1e-5 * exact.abs().max()).all()
    assert (runs.std(0) > 0).any()


def test_int8_products_and_their_gradients_stand_beside_it(coded: Callable[[], int]) -> None:
    model = Step(F.silu)
    exact = gradients(model, model, X)
    both = compiled(model, skip=[], minimum_gain=0, backward="int8")
    assert torch.cosine_similarity(exact, gradients(both, model, X), 0) > 0.99
    assert coded() == 2  # the inputs of the silu and the square: linears save codes of their own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_dynamic_sizes_and_accumulation(dtype: torch.dtype) -> None:
    model = Step(F.gelu)
    run = compiled(model)

    def two(step: Callable[..., Tensor]) -> Tensor:
        model.zero_grad()
        for x in (X, X[:48], X[:56]):  # the second compiles for any size
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = step(x)
            loss.backward()
        return torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])

    assert torch.cosine_similarity(two(model), two(run), 0) > 0.999


def test_results_and_inputs_of_the_model_stay(coded: Callable[[], int]) -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        return h, torch.tanh(h) @ w

    run = torch.compile(step, backend="qfx", options={"saved_activations": "int8", "skip": ["*"]})
    w = torch.randn(128, 128, requires_grad=True)
    h, y = run(X, w)
    assert coded() == 1  # of the tanh: h is a result, x and w are inputs
    (h.sum() + y.sum()).backward()


def test_the_option_is_checked() -> None:
    with pytest.raises(
        ValueError, match="unknown saved_activations 'int4'; choose from float, int8"
    ):
        qfx.Config(saved_activations="int4")
    for inner in ("eager", "aot_eager"):
        with pytest.raises(ValueError, match=r'compiler "inductor".*save_in_int8'):
            qfx.Config(saved_activations="int8", inner=inner)
