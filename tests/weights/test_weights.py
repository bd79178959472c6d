"""A packed weight is never stale and never leaks, whatever way the weight changes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx import _C
from qfx.ops.packing import Packing
from qfx.weights.cache import CACHE
from tests.lib.models import compiled, int8_by_hand
from tests.lib.pairs import every

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


def _merged(model: Model) -> None:
    """What merging an adapter does."""
    model.a.weight.data += torch.randn(8, 2) @ torch.randn(2, 8)


def _numpy(model: Model) -> None:
    model.a.weight.detach().numpy()[:] *= 3


def _storage(model: Model) -> None:
    model.a.weight.untyped_storage().copy_(torch.randn(8, 8).untyped_storage())


def _fused_sgd(model: Model) -> None:
    """What a fused optimizer calls, without the optimizer."""
    w = [model.a.weight.data]
    how = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False}
    torch._fused_sgd_(w, [torch.randn(8, 8)], [], **how, maximize=False, is_first_step=False)


def _exchanged(model: Model) -> None:
    model.a.weight.data, model.b.weight.data = torch.randn(8, 8), model.a.weight.data[:6]


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
    "data_in_place": lambda m: m.a.weight.data.mul_(3),
    "data_copied": lambda m: m.b.weight.data.copy_(torch.randn(6, 8)),
    "one_element_of_data": lambda m: m.b.weight.data[2, 3].fill_(100),
    "data_exchanged": _exchanged,
    "adapter": _merged,
    "numpy": _numpy,
    "storage": _storage,
    "fused_sgd": _fused_sgd,
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


@pytest.mark.parametrize("name, mode", every(CHANGES, [torch.no_grad, torch.inference_mode]))
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
        model.a.weight.mul_(3)  # such tensors have no version counter
        assert torch.equal(f(X), _by_hand(model, X))
        model.load_state_dict(_state(model))
        assert torch.equal(f(X), _by_hand(model, X))
    with torch.no_grad():
        assert torch.equal(f(X), _by_hand(model, X))


def test_a_flat_buffer_behind_all_weights() -> None:
    """As optimizers with master weights have it: the weights are views of what is written."""
    model = Model()
    flat = torch.randn(112)
    model.a.weight.data, model.b.weight.data = flat[:64].view(8, 8), flat[64:].view(6, 8)
    f = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(f(X), _by_hand(model, X))
            flat.copy_(torch.randn(112))


def test_a_weight_of_qat_in_eval_mode() -> None:
    linear = qfx.nn.LSQLinear(8, 6).eval()
    with torch.no_grad():
        linear(X)
        linear.weight.data += 1
        linear.w_log_step.data -= 0.5
        expected = copy.deepcopy(linear)(X)
        assert torch.equal(linear(X), expected)


class Wide(nn.Module):
    """Of whose weight a call looks at a sample only."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(96, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.w)


def test_a_new_compilation_trusts_no_pack() -> None:
    """Not even of a weight of which a single element was written, which no call can see."""
    model, x = Wide(), torch.randn(3, 64)
    with torch.no_grad():
        compiled(model)(x)
        model.w.data[95, 63] = 100
        torch._dynamo.reset()
        assert torch.equal(compiled(model)(x), int8_by_hand(x, model.w))


def test_one_seen_write_makes_a_call_compare_all_weights() -> None:
    first, second = Wide(), Wide()
    x = torch.randn(3, 64)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return first(x), second(x)

    f = compiled(both)
    with torch.no_grad():
        f(x)
        first.w.data += 1
        second.w.data[95, 63] = 100  # not seen by itself
        assert all(map(torch.equal, f(x), (int8_by_hand(x, m.w) for m in (first, second))))


def test_a_fused_step_on_one_element_is_seen() -> None:
    """It counts no version, and no sample has the element."""
    model, x = Wide(), torch.randn(3, 64)
    f = compiled(model)
    with torch.no_grad():
        f(x)
    model.w.grad = torch.zeros(96, 64)
    model.w.grad[95, 63] = 100
    torch.optim.SGD([model.w], lr=1.0, fused=True).step()
    with torch.no_grad():
        assert torch.equal(f(x), int8_by_hand(x, model.w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_is_seen(dtype: torch.dtype) -> None:
    """A delta of a thousandth of the weights, in all of them or in a third of the rows. In bfloat16
    it changes a fifth of the elements; the chance to miss it is that of the elements looked at."""
    shape, missed = (384, 128), []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(shape, generator=generator).to(dtype)
        before, snapshot = weight.clone(), _C.Snapshot((weight,), [0])
        third = weight[128 * (seed % 3) :][:128] if seed % 4 else weight
        third.data += 1e-3 * torch.randn(third.shape, generator=generator).to(dtype)
        changed = float((weight != before).float().sum() / third.numel())
        looked_at = _C.sample_size(weight) * third.numel() / weight.numel()
        assert looked_at >= (64 if dtype == torch.bfloat16 else 32)
        missed.append((1 - changed) ** looked_at)
        assert not snapshot.unchanged((weight,))
    assert max(missed) < 2e-6


def test_a_weight_is_packed_once() -> None:
    model = Model()
    f = compiled(model)
    before = CACHE.packs
    with torch.no_grad():
        for _ in range(3):
            f(X)
    assert CACHE.packs == before + 2


@pytest.mark.parametrize(("factor", "packs"), [(1, 0), (2, 1)])
def test_a_weight_is_packed_again_once_if_its_content_has_changed(factor: int, packs: int) -> None:
    weight, packing = nn.Parameter(torch.randn(8, 8)), Packing(qfx.QSpec())
    CACHE.get(weight, (), packing)
    before = CACHE.packs
    weight.data *= factor
    for _ in range(3):
        CACHE.invalidate([weight])
        CACHE.get(weight, (), packing)
    assert CACHE.packs == before + packs


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
        address = CACHE.get(model.a.weight, (), spec).weight.data_ptr()
        model.a.weight.mul_(2)
        f(X)
    assert CACHE.get(model.a.weight, (), spec).weight.data_ptr() == address


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
    expected = qfx.weights.cache.pack(weight, (), spec)
    assert torch.equal(CACHE.get(weight, (), spec).weight, expected.weight)


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
    expected = qfx.weights.cache.pack(first, (), spec).weight
    assert torch.equal(CACHE.get(first, (), spec).weight, expected)
    packs = CACHE.packs
    for weight in 3 * (first, second):
        assert torch.equal(CACHE.get(weight, (), spec).weight, expected)
    assert CACHE.packs == packs


def test_no_parameter_is_known_when_another_has_its_memory_packed_anew() -> None:
    first = nn.Parameter(torch.randn(8, 8))
    second, before, spec = nn.Parameter(first.data), first.detach().clone(), Packing(qfx.QSpec())
    expected = CACHE.get(first, (), spec).weight.clone()
    with torch.no_grad():
        second.mul_(-3)
    assert not torch.equal(CACHE.get(second, (), spec).weight, expected)
    first.data.copy_(before)  # which is all that it had before
    assert torch.equal(CACHE.get(first, (), spec).weight, expected)


# --- operands that are rewritten between calls ---


class Keys(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(64, 64)
        self.register_buffer("keys", torch.randn(48, 64))

    def rewrite(self) -> None:
        if self.how == "written":
            self.keys.copy_(torch.randn(48, 64))
        elif self.how == "behind":
            self.keys.data.copy_(torch.randn(48, 64))
        elif self.how == "replaced":
            self.keys = torch.randn(48, 64)
        elif self.how == "parameter":
            self.linear.weight.mul_(1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.keys.T


@pytest.mark.parametrize("how", ["written", "behind", "replaced", "parameter", "nothing"])
def test_a_buffer_that_every_call_finds_rewritten_is_packed_in_the_graph(how: str) -> None:
    model, x = Keys(how), torch.randn(3, 64)
    f = compiled(model)
    packs = []
    with torch.no_grad():
        for _ in range(7):
            model.rewrite()
            before = CACHE.packs
            scores = int8_by_hand(
                int8_by_hand(x, model.linear.weight) + model.linear.bias, model.keys
            )
            torch.testing.assert_close(f(x), scores, rtol=1e-5, atol=1e-4)
            packs.append(CACHE.packs - before)
        reason = str(qfx.explain(model, x))
    each = {"parameter": [2, 1, 1, 1, 1, 1, 1], "nothing": [2, 0, 0, 0, 0, 0, 0]}
    assert packs == each.get(how, [2, 1, 1, 1, 0, 0, 0])
    assert ("it was rewritten before each of the last calls" in reason) == (how not in each)
    torch._dynamo.reset()
    assert "rewritten" not in str(qfx.explain(model, x))


def test_packing_at_every_call_has_its_price() -> None:
    """A small product of a large operand: to pack it takes longer than int8 saves."""
    model, x = nn.Module(), torch.randn(8, 256)
    model.register_buffer("keys", torch.randn(1024, 256))
    model.forward = lambda x: x @ model.keys.T  # type: ignore[method-assign]
    f = torch.compile(model.forward, backend=qfx.backend, options={"inner": "eager"})
    with torch.no_grad():
        for call in range(6):
            model.keys.copy_(torch.randn(1024, 256))  # type: ignore[operator]
            assert torch.equal(f(x), x @ model.keys.T) == (call > 3)
        (kept,) = qfx.explain(model.forward, x).rows
        torch._dynamo.reset()
        (once,) = qfx.explain(model.forward, x).rows
    assert (kept.scheme, once.scheme) == ("float", "xa8r_ws8r_h64")
    assert kept.int8_s is not None and kept.float_s is not None and kept.int8_s > kept.float_s
