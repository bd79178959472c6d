"""Training through the compiler: every way to run one int8 step gives the same gradients, bit for
bit, and near those of float; optimizers, frozen parts, autocast, seeds; what cannot be is an error.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import qfx
from qfx.batch_cost import BatchTable
from qfx.report import sqnr
from qfx.weights import CACHE
from tests.conftest import FIXED_BMM_COST
from tests.models import compiled

WORDS, FEATURES = 32, 16
Gradients = dict[str, Tensor | None]
Function = Callable[..., Any]


class Language(nn.Module):
    """Next-word scores: a residual MLP behind a norm, its head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, FEATURES), nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        h = self.embed(words)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return self.head(h)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


_data = torch.Generator().manual_seed(1)
BATCH = torch.randint(0, WORDS, (4, 8), generator=_data)
NEXT = torch.randint(0, WORDS, (4, 8), generator=_data)
X = torch.randn(6, 8, generator=_data)


def _new(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind()


def _loss(f: Function, part: slice = slice(None), reduction: str = "mean") -> Tensor:
    return F.cross_entropy(
        f(BATCH[part]).flatten(0, 1).float(), NEXT[part].flatten(), reduction=reduction
    )


def _collected(model: nn.Module) -> Gradients:
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def _step(f: Function, model: nn.Module) -> Gradients:
    """The gradients of one step of a Language."""
    _loss(f).backward()
    return _collected(model)


def _square(y: Tensor) -> Tensor:
    return y.square().sum()


def _of_x_too(f: Function, model: nn.Module, loss: Function = _square, x: Tensor = X) -> Gradients:
    """The gradients of a loss of f(x): those of the model and that of x."""
    x = x.detach().clone().requires_grad_()
    loss(f(x)).backward()
    return {"x": x.grad, **_collected(model)}


def _same(a: Gradients, b: Gradients) -> bool:
    """Gradients for the same tensors, with the same types and bits."""
    pairs = [(a[name], b[name]) for name in a]
    return a.keys() == b.keys() and all(
        v is w is None or (v is not None and w is not None and v.dtype == w.dtype and v.equal(w))
        for v, w in pairs
    )


def _near(expected: Gradients, found: Gradients, at_least: float = 25) -> bool:
    """int8 beside float: gradients for the same tensors, of the same types, close but not equal."""
    for name, e in expected.items():
        d = found[name]
        if (e is None) != (d is None):
            raise AssertionError(f"gradient of {name}: float {e is not None}, int8 {d is not None}")
        if e is not None and d is not None:
            assert e.dtype == d.dtype and sqnr(e, d) > at_least, name
    return any(e is not None and not e.equal(found[n]) for n, e in expected.items())


# --- one step, run in many ways ---


def _plain(model: Language, inner: str) -> Gradients:
    return _step(compiled(model, inner=inner), model)


def _checkpoint_inside(model: Language, inner: str) -> Gradients:
    return _step(
        compiled(lambda words: checkpoint(model, words, use_reentrant=False), inner=inner), model
    )


def _checkpoint_around(model: Language, inner: str) -> Gradients:
    f = compiled(model, inner=inner)
    return _step(lambda words: checkpoint(f, words, use_reentrant=False), model)


def _compiled_autograd(model: Language, inner: str) -> Gradients:
    f = compiled(model, inner=inner)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        return _step(f, model)


def _whole_step_compiled(model: Language, inner: str) -> Gradients:
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled(lambda: _loss(model).backward(), inner=inner)()
    return _collected(model)


def _saved_elsewhere(model: Language, inner: str) -> Gradients:
    f = compiled(model, inner=inner)
    with torch.autograd.graph.save_on_cpu():
        return _step(f, model)


def _second_backward(model: Language, inner: str) -> Gradients:
    loss = _loss(compiled(model, inner=inner))
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    return _collected(model)


def _after_inference(model: Language, inner: str) -> Gradients:
    f = compiled(model, inner=inner)
    with torch.inference_mode():
        f(BATCH)
    return _step(f, model)


def _other_thread(model: Language, inner: str) -> Gradients:
    f, found = compiled(model, inner=inner), []
    thread = threading.Thread(target=lambda: found.append(_step(f, model)))
    thread.start()
    thread.join()
    return found[0]


WAYS = [
    _plain, _checkpoint_inside, _checkpoint_around, _compiled_autograd, _whole_step_compiled,
    _saved_elsewhere, _second_backward, _after_inference, _other_thread,
]  # fmt: skip


@cache
def _reference() -> Gradients:
    """One step as the rewritten graph and eager autograd have it, near float's."""
    model = _new(Language)
    found = _plain(model, "eager")
    torch._dynamo.reset()
    assert _near(_step(model, model), found)
    return found


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_bits(way: Function, inner: str) -> None:
    assert _same(_reference(), way(_new(Language), inner))


def test_inductor_gives_the_same_weight_gradients() -> None:
    """All matmuls and operators are called as they are, so dw and dx have the same bits; only the
    sums over tokens behind db are reassociated: tokens + 8 roundings of the sum of |g|."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    # dL/dy is all ones; dL/dh, h between the layers, is what reaches the first bias
    eager = _of_x_too(compiled(model, inner="eager"), model, Tensor.sum)
    torch._dynamo.reset()
    found = _of_x_too(compiled(model, inner="inductor"), model, Tensor.sum)
    w_hat = torch.ops.qfx.fake_quantize(model[1].weight, [1], 8, True, torch.float32)
    sizes = {"0.bias": (torch.ones_like(X) @ w_hat).abs().sum(0), "1.bias": torch.tensor(len(X))}
    for name, e in eager.items():
        bound = (len(X) + 8) * 2.0**-24 * sizes.get(name, torch.tensor(0))
        assert ((found[name] - e).abs() <= bound).all(), name


def test_accumulated_gradients_are_the_sum() -> None:
    model = _new(Language)
    f = compiled(model, inner="aot_eager")
    halves = slice(0, 2), slice(2, 4)
    parts = []
    for half in halves:
        _loss(f, half, "sum").backward()
        parts.append(_collected(model))
    for half in halves:
        _loss(f, half, "sum").backward()
    accumulated = _collected(model)
    assert _same(accumulated, {n: parts[0][n] + parts[1][n] for n in accumulated})


def test_the_compiled_backward_keeps_its_products_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where int8 would gain: `backward` says how gradients are computed, nothing else does."""
    fixed = FIXED_BMM_COST
    fast = BatchTable(
        fixed.axes, fixed.int8_s, fixed.float_s, fixed.int8_call_s, fixed.float_call_s
    )
    monkeypatch.setattr("qfx.cost.bmm_table", lambda dtype, threads, isa: fast)
    assert _same(_reference(), _whole_step_compiled(_new(Language), "eager"))


@pytest.mark.parametrize(
    "capture",
    [
        pytest.param(lambda model: qfx.trace(model, X), id="trace with shapes"),
        pytest.param(qfx.trace, id="trace"),
        pytest.param(lambda model: torch.export.export(model, (X,)).module(), id="export"),
    ],
)
def test_a_graph_rewritten_for_training_has_the_same_bits(capture: Function) -> None:
    model = _new(Two)
    reference = _of_x_too(compiled(model), model)
    config = qfx.Config(minimum_gain=0, scheme="w8a8-asymmetric")
    gm, plan = qfx.rewrite(capture(model), config, training=True)
    assert plan.quantized == 2
    assert _same(reference, _of_x_too(gm, gm))


# --- graphs where gradients flow to some tensors only, and losses with odd gradients ---


def _no_grad_region(m: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = m.a(x).abs().mean()
    return m.b(m.a(x)) * size


def _enabled_in_no_grad(m: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x)
        with torch.enable_grad():
            return m.b(h)


def _weight_viewed_without_gradients(m: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        w = m.b.weight.t()
    return m.a(x) @ w


def _hook_inside(m: Two, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda grad: 3 * grad)
    return m.b(h)


def _frozen_weights(m: Two, x: Tensor) -> Tensor:
    m.a.weight.requires_grad_(False)
    return m(x)


FLOWS: dict[str, Callable[[Two, Tensor], Tensor]] = {
    "no_grad region": _no_grad_region,
    "enable_grad in no_grad": _enabled_in_no_grad,
    "hook inside": _hook_inside,
    "x detached": lambda m, x: m(x.detach()),
    "h detached and not": lambda m, x: m.b(m.a(x).detach().reshape(2, 3, 8)).flatten(0, 1) + m.a(x),
    "bias detached": lambda m, x: F.linear(m.a(x), m.b.weight, m.b.bias.detach()),
    "one output of two": lambda m, x: (m.a(x), m.b(x))[0],
    "weight slice": lambda m, x: F.linear(m.a(x), m.b.weight[:4]),
    "weight detached": lambda m, x: F.linear(m.a(x), m.b.weight.detach()),
    "weight detached and not": lambda m, x: m.b(F.linear(x, m.b.weight.detach())),
    "weight viewed in no_grad": _weight_viewed_without_gradients,
    "whole": lambda m, x: m(x),
}


@pytest.mark.parametrize("flow", FLOWS)
def test_gradients_flow_where_they_do_in_float(flow: str) -> None:
    model = _new(Two)

    def function(x: Tensor) -> Tensor:
        return FLOWS[flow](model, x)

    expected = _of_x_too(function, model)
    eager = _of_x_too(compiled(function, inner="eager"), model)
    assert _near(expected, eager)
    torch._dynamo.reset()
    assert _same(eager, _of_x_too(compiled(function, inner="aot_eager"), model))


@pytest.mark.parametrize("frozen", [["a.weight"], ["a.weight", "b.weight"], ["a.bias", "b.bias"]])
def test_some_parameters_frozen(frozen: list[str]) -> None:
    model = _new(Two)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    eager = _of_x_too(compiled(model, inner="eager"), model)
    assert [n for n in eager if eager[n] is None] == frozen
    assert _near(_of_x_too(model, model), eager)
    torch._dynamo.reset()
    assert _same(eager, _of_x_too(compiled(model, inner="aot_eager"), model))


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": Tensor.sum,
    "strided": lambda y: y[::2, 1::3].square().sum(),
    "transposed": lambda y: (y.t() @ torch.arange(6.0)).square().sum(),
    "zero": lambda y: (0 * y).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_whose_gradient_is_not_contiguous(loss: str) -> None:
    model = _new(Two)
    eager = _of_x_too(compiled(model, inner="eager"), model, LOSSES[loss])
    torch._dynamo.reset()
    assert _same(eager, _of_x_too(compiled(model, inner="aot_eager"), model, LOSSES[loss]))
    if loss == "zero":
        assert all(d is not None and not d.any() for d in eager.values())
    else:
        assert _near(_of_x_too(model, model, LOSSES[loss]), eager)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_without_rows_gradients_are_zero(inner: str) -> None:
    model = _new(Two)
    found = _of_x_too(compiled(model, inner=inner), model, x=X[:0])
    assert all(d is not None and not d.any() for d in found.values())


def test_hooks_see_and_change_gradients() -> None:
    model, seen = _new(Two), []
    f = compiled(model, inner="aot_eager")
    plain = _of_x_too(f, model)
    model.a.weight.register_hook(lambda grad: 2 * grad)
    model.b.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    hooked = _of_x_too(f, model)
    assert _same(hooked, {**plain, "a.weight": 2 * plain["a.weight"]})
    assert len(seen) == 1 and seen[0].equal(plain["b.bias"])


def test_batched_gradients_are_those_one_by_one() -> None:
    """`is_grads_batched`, on which torch.autograd.functional.jacobian(vectorize=True) stands."""
    model, x = _new(Two), X.clone().requires_grad_()
    y, leaves = compiled(model, inner="aot_eager", backward="int8")(x), [x, *model.parameters()]
    batch = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(0))
    batched = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, leaves, g, retain_graph=True) for g in batch]
    columns = zip(*single, strict=True)
    assert all(b.equal(torch.stack(s)) for b, s in zip(batched, columns, strict=True))


@pytest.mark.parametrize("trains", [True, False])
def test_a_weight_changed_before_backward_is_an_error(trains: bool) -> None:
    """As in float, whether the weight itself was saved or its packed form."""
    model, x = _new(Two), X.clone().requires_grad_()
    model.b.weight.requires_grad_(trains)
    f = compiled(model, inner="aot_eager")
    y = f(x)
    with torch.no_grad():
        model.b.weight.mul_(2)
        f(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- optimizers, frozen layers, adapters ---


def _foreach(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.02, foreach=True)


# name -> (optimizer, whether its step is compiled)
OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], bool]] = {
    "sgd": (lambda p: SGD(p, lr=0.05), False),
    "adamw foreach": (_foreach, False),
    "adamw fused": (lambda p: AdamW(p, lr=0.02, fused=True), False),
    "adamw compiled": (_foreach, True),
    "sgd compiled": (lambda p: SGD(p, lr=0.05, foreach=True), True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inference_after_each_step_sees_the_new_weights(name: str) -> None:
    """The same bits as a copy that was never trained or packed before."""
    make, compiles = OPTIMIZERS[name]
    model = _new(Language)
    f, optimizer = compiled(model, inner="aot_eager"), make(model.parameters())
    step = torch.compile(optimizer.step, backend="aot_eager") if compiles else optimizer.step
    losses, seen = [], []
    for _ in range(3):
        loss = _loss(f)
        loss.backward()
        step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            seen.append(f(BATCH))
            assert seen[-1].equal(compiled(copy.deepcopy(model))(BATCH))
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert not seen[0].equal(seen[1])


def test_layers_frozen_and_thawed_between_steps() -> None:
    """One compiled function through all of it has the gradients of fresh ones."""
    model = _new(Two)
    f = compiled(model, inner="aot_eager")
    for frozen in ("", "a", "b.weight", ""):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or not name.startswith(frozen))
        found = _of_x_too(f, model)
        assert _near(_of_x_too(model, model), found)
        assert _same(found, _of_x_too(compiled(model), model))


class Adapted(nn.Module):
    """A frozen linear with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("optimized", ["adapters", "all"])
def test_the_frozen_base_of_adapters_is_packed_once(optimized: str) -> None:
    """Also when the optimizer was given all parameters: without a gradient it changes none."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.GELU(), Adapted())
    f, before, losses = compiled(model, inner="aot_eager"), CACHE.packs, []
    parameters = [p for p in model.parameters() if p.requires_grad or optimized == "all"]
    optimizer = AdamW(parameters, lr=0.02)
    for _ in range(4):
        optimizer.zero_grad()
        loss = f(X).sub(1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert CACHE.packs == before + 2


# --- types, shapes, seeds, modes ---


def _autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("way", ["autocast", "autocast inside", "bfloat16"])
def test_types_are_those_of_float(way: str) -> None:
    """Of outputs and of gradients, and all gradients as close as bfloat16 is."""
    model = _new(Language)
    if way == "bfloat16":
        model = model.bfloat16()

    def inside(words: Tensor) -> Tensor:
        with _autocast():
            return model(words)

    def run(f: Function) -> tuple[torch.dtype, Gradients]:
        with _autocast() if way == "autocast" else contextlib.nullcontext():
            y = f(BATCH)
        F.cross_entropy(y.flatten(0, 1).float(), NEXT.flatten()).backward()
        return y.dtype, _collected(model)

    function = inside if way == "autocast inside" else model
    dtype, expected = run(function)
    y_eager, eager = run(compiled(function))
    torch._dynamo.reset()
    y_aot, aot = run(compiled(function, inner="aot_eager"))
    assert dtype == y_eager == y_aot == torch.bfloat16
    assert _near(expected, aot) and _same(eager, aot)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("marked", [True, False])
def test_dynamic_shapes_train_with_one_compilation(marked: bool, inner: str) -> None:
    """Each batch size has the gradients of its own static graph. Linear layers alone, so that
    Inductor too has the same bits, without biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    options = {"minimum_gain": 0, "scheme": "w8a8-asymmetric", "inner": inner}
    dynamic = None if marked else True
    f = torch.compile(model, backend=qfx.backend, dynamic=dynamic, options=options)
    found = {}
    counters.clear()
    for rows in (6, 4, 9, 17):
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)).requires_grad_()
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        f(x).square().sum().backward()
        found[x] = {"x": x.grad, **_collected(model)}
    assert counters["stats"]["unique_graphs"] == 1
    for x, gradients in found.items():
        torch._dynamo.reset()
        assert _same(_of_x_too(compiled(model), model, x=x), gradients)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_the_int8_backward_depends_on_the_seed_alone(inner: str) -> None:
    """One torch.manual_seed, one result, checkpointed or not; the mean over seeds is the gradient
    that the float backward has of the same forward, z < 5 for each element."""
    model = _new(Two)
    exact = _of_x_too(compiled(model), model)
    torch._dynamo.reset()
    f = compiled(model, inner=inner, backward="int8")

    def seeded(seed: int, f: Function = f) -> Gradients:
        torch.manual_seed(seed)
        return _of_x_too(f, model)

    runs = [seeded(s) for s in range(100)]
    assert _same(runs[0], seeded(0))
    assert _same(runs[0], seeded(0, lambda x: checkpoint(f, x, use_reentrant=False)))
    for name, e in exact.items():
        stack = torch.stack([r[name] for r in runs]).double()
        if name == "b.bias":
            assert stack.eq(e).all()
            continue
        assert not stack[0].equal(stack[1]), name
        bound = 5 * stack.std(0) / len(runs) ** 0.5 + 1e-6 * stack.abs().amax()
        assert ((stack.mean(0) - e).abs() <= bound).all(), name


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_inductor(mode: str) -> None:
    """A layer large enough to be int8 without options; dx and dw have the bits of inner="eager"."""
    torch.manual_seed(0)
    model, x = nn.Linear(256, 256, bias=False), torch.randn(64, 256)
    eager = _of_x_too(
        torch.compile(model, backend=qfx.backend, options={"inner": "eager"}), model, x=x
    )
    torch._dynamo.reset()
    f = torch.compile(model, backend=qfx.backend, mode=mode)
    assert _same(eager, _of_x_too(f, model, x=x))
    assert _near(_of_x_too(model, model, x=x), eager)


# --- what has no int8 form: an error, or as in float; never zeros ---


def _double_backward(f: Function) -> Tensor:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)[0]


def _dual(f: Function) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


ERRORS: dict[str, tuple[Function, str]] = {
    "double backward": (_double_backward, "no second derivative|not currently support double"),
    "hessian": (
        lambda f: torch.autograd.functional.hessian(lambda x: f(x).square().sum(), X),
        "no second derivative|not currently support double",
    ),
    "dual numbers": (_dual, "carries a forward-mode tangent|implement the jvp function"),
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("name", ERRORS)
def test_second_orders_and_tangents_are_errors(name: str, warm: bool, inner: str) -> None:
    function, phrase = ERRORS[name]
    f = compiled(_new(Two), inner=inner)
    if warm:
        f(X)
    with pytest.raises((NotImplementedError, RuntimeError), match=phrase):
        function(f)


TRANSFORMS: dict[str, Function] = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (torch.ones_like(X),))[1],
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([X, 2 * X])),
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum())(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](torch.ones_like(X))[0],
    "jacrev": lambda f: torch.func.jacrev(f)(X[:2]),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X[:2]),
    "jacobian": lambda f: torch.autograd.functional.jacobian(f, X[:2], vectorize=True),
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_a_compiled_function_are_right(name: str, warm: bool, inner: str) -> None:
    """Dynamo leaves what runs inside a transform to eager PyTorch, so it is float or near float."""
    model = _new(Two)
    f = compiled(model, inner=inner)
    if warm:
        f(X), f(X.clone().requires_grad_())
    expected, found = TRANSFORMS[name](model), TRANSFORMS[name](f)
    assert expected.any() and (found.equal(expected) or sqnr(expected, found) > 25)
