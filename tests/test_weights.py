"""A packed weight is never stale and never leaks, whatever way the weight changes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.packing import Packing
from qfx.weights import CACHE
from tests.models import compiled, int8_by_hand

X = torch.randn(3, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def _by_hand(model: Model, x: Tensor) -> Tensor:
    return int8_by_hand(int8_by_hand(x, model.a.weight), model.b.weight)


def _step(model: Model, **how: object) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)  # type: ignore[arg-type]
    with torch.enable_grad():
        model(X).square().sum().backward()
    optimizer.step()


def _compiled_step(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.enable_grad():
        model(X).square().sum().backward()
    torch.compile(optimizer.step, backend="aot_eager")()


def _state(model: Model) -> dict[str, Tensor]:
    return {name: torch.randn_like(t) for name, t in model.state_dict().items()}


def _data(model: Model) -> None:
    model.a.weight.data = torch.randn(8, 8)


def _data_in_place(model: Model) -> None:
    model.a.weight.data.mul_(3)
    qfx.invalidate(model)


def _numpy(model: Model) -> None:
    model.a.weight.detach().numpy()[:] *= 3
    qfx.invalidate(model.a.weight)


def _swap(model: Model) -> None:
    model.a = nn.Linear(8, 8, bias=False)


def _tie(model: Model) -> None:
    model.b.weight = model.a.weight


def _vector(model: Model) -> None:
    nn.utils.vector_to_parameters(torch.randn(112), model.parameters())


def _no_change(model: Model) -> None: ...


CHANGES: dict[str, Callable[[Model], object]] = {
    "nothing": _no_change,
    "in_place": lambda m: m.a.weight.mul_(3),
    "init": lambda m: nn.init.normal_(m.b.weight),
    "one_element": lambda m: m.a.weight[0, 0].fill_(100),
    "load_state_dict": lambda m: m.load_state_dict(_state(m)),
    "load_state_dict_assign": lambda m: m.load_state_dict(_state(m), assign=True),
    "data": _data,
    "data_in_place": _data_in_place,
    "numpy": _numpy,
    "fused_step": lambda m: _step(m, fused=True),
    "foreach_step": lambda m: _step(m, foreach=True),
    "plain_step": lambda m: _step(m, foreach=False),
    "compiled_step": _compiled_step,
    "module_swap": _swap,
    "tied": _tie,
    "vector_to_parameters": _vector,
    "requires_grad_off": lambda m: m.requires_grad_(False),
    "bfloat16": lambda m: m.to(torch.bfloat16),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CHANGES)
def test_change_is_seen(name: str, mode: Callable[..., object]) -> None:
    torch.manual_seed(0)
    model = Model()
    f = compiled(model)
    with mode():
        assert torch.equal(f(X), _by_hand(model, X))
    with torch.no_grad():
        CHANGES[name](model)
    x = X.to(model.a.weight.dtype)
    with mode():
        assert torch.equal(f(x), _by_hand(model, x))
        assert torch.equal(f(x), _by_hand(model, x))


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = Model()
        f = compiled(model)
        assert torch.equal(f(X), _by_hand(model, X))
        model.a.weight.mul_(3)
        qfx.invalidate(model)  # such tensors have no version counter
        assert torch.equal(f(X), _by_hand(model, X))
    with torch.no_grad():
        assert torch.equal(f(X), _by_hand(model, X))


def test_a_weight_is_packed_once() -> None:
    model = Model()
    f = compiled(model)
    before = CACHE.packs
    with torch.no_grad():
        for _ in range(3):
            f(X)
    assert CACHE.packs == before + 2


def test_a_stale_weight_is_packed_once() -> None:
    weight, packing = nn.Parameter(torch.randn(8, 8)), Packing(qfx.QSpec())
    CACHE.get(weight, (), packing)
    CACHE.invalidate([weight])
    before = CACHE.packs
    for _ in range(3):
        CACHE.get(weight, (), packing)
    assert CACHE.packs == before + 1


def test_another_optimizer_does_not_repack() -> None:
    model, other = Model(), Model()
    f = compiled(model)
    with torch.no_grad():
        f(X)
    before = CACHE.packs
    _step(other, fused=True)
    with torch.no_grad():
        f(X)
    assert CACHE.packs == before


def test_packed_buffers_keep_their_address() -> None:
    model = Model()
    f = compiled(model)
    spec = Packing(qfx.QSpec())
    with torch.no_grad():
        f(X)
        address = CACHE.get(model.a.weight, (), spec).blocks.data_ptr()
        model.a.weight.mul_(2)
        f(X)
    assert CACHE.get(model.a.weight, (), spec).blocks.data_ptr() == address


def test_instances_that_share_code_have_their_own_weights() -> None:
    models = [Model() for _ in range(3)]
    functions = [compiled(m) for m in models]
    with torch.no_grad():
        for _ in range(2):
            for model, f in zip(models, functions, strict=True):
                assert torch.equal(f(X), _by_hand(model, X))


def test_dead_weights_are_forgotten() -> None:
    gc.collect()
    before = len(CACHE)
    model = Model()
    f = compiled(model)
    with torch.no_grad():
        f(X)
    assert len(CACHE) == before + 2
    del model, f
    torch._dynamo.reset()
    gc.collect()
    assert len(CACHE) == before


def test_the_cache_does_not_hinder_swap_tensors() -> None:
    """`swap_tensors`, which `module.to` may use, refuses tensors that have weak references."""
    weight, other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    spec = Packing(qfx.QSpec())
    CACHE.get(weight, (), spec)
    torch.utils.swap_tensors(weight, other)
    expected = qfx.weights.pack(weight, (), spec)
    assert torch.equal(CACHE.get(weight, (), spec).blocks, expected.blocks)


def test_freed_weight_is_an_error() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"shape \[4, 4\] has no storage"):
        CACHE.get(weight, (), Packing(qfx.QSpec()))


def test_threads_share_the_cache() -> None:
    from concurrent.futures import ThreadPoolExecutor

    weight = nn.Parameter(torch.randn(64, 64))
    before = CACHE.packs
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: CACHE.get(weight, (), Packing(qfx.QSpec())), range(32)))
    assert CACHE.packs == before + 1


class Writing(nn.Module):
    """Changes its weight inside the graph, before it is used."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.w = how, nn.Parameter(torch.randn(8, 8))
        self.other = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("alias", self.w.detach())

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "foreach":
            torch._foreach_mul_([self.other, self.w], 2.0)
        elif self.how == "alias":
            self.alias.mul_(2)
        elif self.how == "max_norm":
            torch.nn.functional.embedding(torch.arange(8), self.w, max_norm=0.5)
        elif self.how == "view":
            self.w.view(-1)[3:5].zero_()
        return torch.nn.functional.linear(x, self.w)


@pytest.mark.parametrize("how", ["foreach", "alias", "max_norm", "view"])
def test_weights_written_inside_the_graph(how: str) -> None:
    model, eager = Writing(how), Writing(how)
    eager.load_state_dict(model.state_dict())
    f = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(f(X), eager(X), rtol=0.1, atol=0.1 * float(eager.w.abs().max()))


def test_a_weight_that_a_checkpoint_only_reads_is_packed() -> None:
    from torch.utils.checkpoint import checkpoint

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + checkpoint(self.a, x, use_reentrant=False)

    before = CACHE.packs
    with torch.no_grad():
        compiled(Both())(X)
    assert CACHE.packs == before + 1


def test_a_parameter_and_its_transpose_in_one_memory_are_two_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(8, 8))
            self.b = nn.Parameter(self.a.data.t())

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.a) - nn.functional.linear(x, self.b)

    model, x = Tied(), torch.randn(4, 8)
    expected = int8_by_hand(x, model.a) - int8_by_hand(x, model.b)
    with torch.no_grad():
        f = compiled(model)
        assert torch.equal(f(x), expected) and torch.equal(f(x), expected)


def test_parameters_that_share_memory_but_count_versions_apart() -> None:
    first = nn.Parameter(torch.randn(8, 8))
    second = nn.Parameter(first.data)
    spec = Packing(qfx.QSpec())
    with torch.no_grad():
        second.mul_(2)
        CACHE.get(second, (), spec)
        first.mul_(-3)  # its first version, as `second` is at its first
    expected = qfx.weights.pack(first, (), spec).blocks
    assert torch.equal(CACHE.get(first, (), spec).blocks, expected)
