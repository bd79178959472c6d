"""qfx.save_in_int8: what is saved in 8 bits, once, and that gradients are unbiased estimates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qfx
from qfx.nn import save_in_int8
from qfx.nn.packed_flags import PackedFlags

X = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(128, 256), nn.LayerNorm(256), nn.SiLU(), nn.Linear(256, 256), nn.GELU(),
        nn.Linear(256, 64),
    )  # fmt: skip


def gradients(model: nn.Module, x: Tensor, seed: int | None) -> Tensor:
    """All gradients of a model, under save_in_int8 with this seed, or without."""
    model.zero_grad()
    if seed is None:
        y = model(x)
    else:
        torch.manual_seed(seed)
        with qfx.save_in_int8():
            y = model(x)
    y.square().sum().backward()
    return torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the tensors that became codes."""
    shapes: list[tuple[int, ...]] = []

    class Counted(save_in_int8._Coded):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            shapes.append(tuple(tensor.shape))
            assert self.q.dtype == torch.int8 and self.q.shape == tensor.shape

    monkeypatch.setattr(save_in_int8, "_Coded", Counted)
    return shapes


def test_gradients_are_close_and_the_output_is_the_same() -> None:
    model = net()
    exact = gradients(model, X, None)
    noisy = gradients(model, X, 0)
    assert torch.cosine_similarity(exact, noisy, 0) > 0.999 and not torch.equal(exact, noisy)
    assert torch.equal(gradients(model, X, 0), noisy)
    with qfx.save_in_int8():
        assert torch.equal(model(X), net()(X))


def test_the_mean_over_seeds_is_the_gradient_of_linears() -> None:
    """Of a linear after a linear, whose gradients are linear in what is saved; z < 5."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 32))
    exact = gradients(model, X, None).double()
    runs = torch.stack([gradients(model, X, seed) for seed in range(200)]).double()
    error = (runs.mean(0) - exact).abs()
    assert (error <= 5 * runs.std(0) / 200**0.5 + 1e-5 * exact.abs().max()).all()
    assert (runs.std(0) > 0).any()


def test_a_tensor_that_several_operators_save_has_its_codes_once(
    coded: list[tuple[int, ...]],
) -> None:
    torch.manual_seed(0)
    first = nn.Linear(128, 256)
    branches = [nn.Linear(256, 256) for _ in range(3)]
    with qfx.save_in_int8():
        x = first(X)
        y = sum((branch(x) for branch in branches), x * x)
    assert coded == [(64, 256)]
    y.sum().backward()
    with qfx.save_in_int8():
        z = branches[0](x.detach().requires_grad_() * 1)
        z.sum().backward()
    assert len(coded) == 2  # another tensor, perhaps where the first one was


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x @ x.t(), -1) @ x,
        lambda x: F.log_softmax(x, -1),
        lambda x: x / (1 + x.square()),
        lambda x: (x.square() + 1e-4) ** 0.5,
        lambda x: (x.abs() + 1e-3).pow(-1),
        lambda x: (x.abs() + 0.5).pow(torch.full_like(x, 0.5)),
        lambda x: F.cross_entropy(x, torch.zeros(64, dtype=torch.int64)),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        lambda x: x.exp(),
    ],
)
def test_what_needs_its_values_keeps_them(function: Callable[[Tensor], Tensor]) -> None:
    """What these functions save themselves: codes of a quotient's divisor could be zero. (The first
    and the third also have products, whose operands are inputs here.)"""
    x = (X[:, :64].repeat(1, 2) + 0.1).requires_grad_()
    (exact,) = torch.autograd.grad(function(x).sum(), x)
    with qfx.save_in_int8():
        y = function(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(found, exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))


def test_inverse_deviations_keep_their_values() -> None:
    """They span orders of magnitude: a group of channels is nearly zero."""
    torch.manual_seed(0)
    x, r = torch.randn(128, 64, 8), torch.randn(128, 64, 8)
    x[:, :2] *= 1e-3
    x.requires_grad_()
    scaled = x * 1
    found = []
    for context in (nullcontext(), qfx.save_in_int8()):
        with context:
            y = F.group_norm(scaled, 32)
        (grad,) = torch.autograd.grad((y * r).sum(), x, retain_graph=True)
        found.append(grad[:, 2:].ravel())
    assert torch.cosine_similarity(*found, 0) > 0.99


def test_weights_that_are_given_by_name_stay(coded: list[tuple[int, ...]]) -> None:
    weight = torch.randn(128, 128, requires_grad=True)
    with qfx.save_in_int8():
        F.linear(X.clone().requires_grad_() + 0, weight=weight)
    assert coded == [(64, 128)]


def test_small_and_narrow_tensors_stay_and_parameters_too() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    x = torch.randn(1024, 8)
    assert torch.equal(gradients(model, x, 0), gradients(model, x, None))  # rows of 16
    wide = nn.Sequential(nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 8))
    assert torch.equal(gradients(wide, X[:8], 0), gradients(wide, X[:8], None))  # 1024 elements


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(128, 128), net()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.inner, self.first(x), use_reentrant=reentrant)
            return found

    torch.manual_seed(0)
    model = Checkpointed()
    exact = gradients(model, X, None)
    assert torch.cosine_similarity(gradients(model, X, 0), exact, 0) > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_and_autocast(dtype: torch.dtype) -> None:
    exact = gradients(net(), X, None)
    found = gradients(net().to(dtype), X.to(dtype), 0)
    assert found.dtype == dtype and torch.cosine_similarity(found.float(), exact, 0) > 0.99
    with torch.autocast("cpu", dtype):
        assert torch.cosine_similarity(gradients(net(), X, 0), exact, 0) > 0.99


def test_an_int8_model_and_a_compiled_one() -> None:
    base = qfx.quantize_(net(), qfx.Config(backward="int8"))
    x = X.clone().requires_grad_()
    (exact,) = torch.autograd.grad(base(x).square().sum(), x)
    with qfx.save_in_int8():
        y = base(x)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.cosine_similarity(found.ravel(), exact.ravel(), 0) > 0.995
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(gradients(compiled, X, 0), gradients(model, X, None))


def test_a_model_learns_as_without() -> None:
    """Two hundred steps of a small regression end at nearly the same loss."""
    losses = []
    for context in (False, True):
        torch.manual_seed(1)
        model, target = net(), torch.randn(64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for _ in range(200):
            optimizer.zero_grad()
            if context:
                with qfx.save_in_int8():
                    loss = F.mse_loss(model(X), target)
            else:
                loss = F.mse_loss(model(X), target)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert abs(losses[1] - losses[0]) < 0.05 * abs(losses[0]) + 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4096, 5003])
def test_masks_of_dropout_are_bits(dtype: torch.dtype, size: int) -> None:
    """A thirty-second of the bytes of float32, and the same gradient, bit for bit."""
    x, grads = X.ravel()[:size].to(dtype).requires_grad_(), []
    for context in (nullcontext(), qfx.save_in_int8()):
        torch.manual_seed(0)
        with context:
            y = F.dropout(x, 0.3) if dtype == torch.float32 else nn.Dropout(0.3)(x)
        grads += torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(*grads) and 0.2 < (grads[0] == 0).float().mean() < 0.4
    saved = save_in_int8._Saved()
    saved.drops = True
    mask = (torch.rand(size) < 0.7).to(dtype) / 0.7
    packed = saved.pack(mask)
    assert isinstance(packed, PackedFlags) and packed.bits.numel() == -(-size // 8)
    assert torch.equal(saved.unpack(packed), mask)


def test_tensors_without_values_are_left_alone() -> None:
    x = torch.randn(64, 128, device="meta", requires_grad=True)
    with qfx.save_in_int8():
        y = nn.Sequential(nn.Dropout(0.1), nn.Linear(128, 64, device="meta"), nn.SiLU())(x)
    y.sum().backward()
    assert x.grad is not None and x.grad.is_meta


@given(st.integers(1, 70), st.sampled_from([torch.bool, torch.float32, torch.float16]))
def test_flags_come_back(size: int, dtype: torch.dtype) -> None:
    flags = (torch.rand(size) < 0.5).to(dtype)
    packed = PackedFlags.of(flags)
    assert packed is not None and torch.equal(packed.values(), flags)
    assert PackedFlags.of(torch.tensor([0.0, 1.0, 2.0])) is None
