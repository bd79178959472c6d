"""torch.compile(model, backend="qfx"): results, names, gradients, dynamic shapes, faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx import backend as compile_with_qfx
from qfx.cost.machine import MachineCost
from qfx.cost.model import Estimate
from qfx.ops.single_tensors import sqnr
from qfx.weights.cache import CACHE
from tests.conftest import UseCosts
from tests.lib.int8_calls import int8_matmuls
from tests.lib.models import FEATURES, Block, compiled
from tests.lib.pairs import every

X = torch.randn(2, 5, FEATURES, generator=torch.Generator().manual_seed(0))


def _int8_calls(function: Any, *args: Any) -> int:
    _, found = int8_matmuls(function, *args)
    return sum(count for name, count in found.items() if name.startswith("qfx::linear"))


@pytest.mark.parametrize(
    "inner, mode", every(["eager", "aot_eager", "inductor"], [torch.no_grad, torch.inference_mode])
)
def test_block(inner: str, mode: Any) -> None:
    torch.manual_seed(0)
    model = Block()
    f = compiled(model, inner=inner)
    with mode():
        y = f(X)
        assert 25 < sqnr(model(X), y) < 60
        # Generated code calls the three, and the two, of one input at once.
        assert _int8_calls(f, X) == (4 if inner == "inductor" else 7)


def test_inductor_and_canonical_agree() -> None:
    """The compiled graph and the canonical one differ by Inductor's float reassociation only."""
    model = Block()
    gm, _ = qfx.rewrite(
        qfx.trace(model, X), qfx.Config(scheme="w8a8-asymmetric", minimum_gain=0), canonical=True
    )
    with torch.no_grad():
        assert sqnr(gm(X), compiled(model, inner="inductor")(X)) > 35


def test_default_options_keep_small_layers_float() -> None:
    model = Block()
    f = torch.compile(model, backend=compile_with_qfx)
    with torch.no_grad():
        assert _int8_calls(f, X) == 0
        assert torch.allclose(f(X), model(X), atol=1e-5)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "set_default_backend"),
    reason=f"PyTorch {torch.__version__} has no torch.compiler.set_default_backend",
)
def test_as_the_default_backend() -> None:
    """Of `torch.compile` without `backend=`, found by its name as a stranger gives it."""
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("qfx")
    try:
        f = torch.compile(Block(), options={"minimum_gain": 0, "inner": "eager"})
    finally:
        torch.compiler.set_default_backend(before)
    with torch.no_grad():
        assert _int8_calls(f, X) == 7


def _gradients(f: Any, model: nn.Module) -> Tensor:
    model.zero_grad()
    f(X).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_gradients_flow_through_int8(inner: str) -> None:
    """Close to float's, not equal: the forward was int8."""
    model = Block()
    expected = _gradients(model, model)
    found = _gradients(compiled(model, inner=inner), model)
    assert 25 < sqnr(expected, found) < 80


def test_training_and_inference_alternate() -> None:
    model = Block()
    f = compiled(model)
    for _ in range(2):
        f(X).sum().backward()
        with torch.no_grad():
            assert _int8_calls(f, X) == 7


def test_a_frozen_weight_gives_the_gradient_of_its_input() -> None:
    """As the base of a LoRA: packed once, dx from the packed codes. (T1)"""
    model = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    f, before = compiled(model, inner="aot_eager"), CACHE.packs
    for _ in range(2):
        x.grad = None
        f(x).sum().backward()
    assert CACHE.packs == before + 1
    w_hat = torch.ops.qfx.fake_quantize(model[0].weight, [1], 8, True, torch.float32)
    assert torch.allclose(x.grad, torch.ones(3, 8) @ w_hat, atol=1e-5)


def test_dynamic_shapes_compile_once() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    model = Block()
    f = torch.compile(model, backend="qfx", dynamic=True, options={"minimum_gain": 0})
    with torch.no_grad():
        for batch, tokens in ((2, 5), (3, 7), (9, 4)):
            x = torch.randn(batch, tokens, FEATURES)
            assert sqnr(model(x), f(x)) > 25
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("batch", [0, 1])
def test_empty_and_single_batches(batch: int) -> None:
    model, x = Block(), torch.randn(batch, 5, FEATURES)
    with torch.no_grad():
        assert compiled(model)(x).shape == model(x).shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_models(dtype: torch.dtype) -> None:
    model, x = Block().to(dtype), X.to(dtype)
    with torch.no_grad():
        y = compiled(model)(x)
        assert y.dtype == dtype and sqnr(model(x), y) > 20


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-groups"])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_keeps_the_dtypes(inside: bool, scheme: str) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if not inside:
                return self.a(x)
            with torch.autocast("cpu", torch.bfloat16):
                return self.a(x)

    model, x = Casting(), torch.randn(4, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        ours = compiled(model, scheme=scheme)
        assert ours(x).dtype == model(x).dtype == torch.bfloat16
        assert _int8_calls(ours, x) == 1


def test_groups_of_symbolic_rows() -> None:
    """One graph for all numbers of rows, codes that q and k share, the bits of the modules."""
    scheme = qfx.Scheme(x=qfx.QSpec(group=32), w=qfx.QSpec(group=32), rotation=16)
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(80, 48), "k": nn.Linear(80, 48)}).eval()
    modules = {name: qfx.nn.Linear.from_float(linear, scheme) for name, linear in model.items()}
    run = lambda parts, x: parts["q"](x) * parts["k"](x)  # noqa: E731
    graphs = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        options = {"scheme": scheme, "minimum_gain": 0, "inner": "eager"}
        return qfx.backend(gm, inputs, options=options)

    ours = torch.compile(lambda x: run(model, x), backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (7, 3, 50):
            x = torch.randn(rows, 80)
            assert torch.equal(ours(x), run(modules, x))
    assert len(graphs) == 1


def test_double_models_are_left_alone() -> None:
    model, x = Block().double(), X.double()
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), model(x))


def test_nan_stays_in_its_row() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    with torch.no_grad():
        y = compiled(model)(x)
    assert y.isnan().all(1).tolist() == [False, True, True, False]


class Broken(nn.Module):
    """A graph break between two linears, one of them in a submodule with its own break."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Inner()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        torch._dynamo.graph_break()
        return self.head(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.head(x)


@pytest.mark.parametrize(
    ("skip", "expected"),
    [([], 3), (["head"], 1), (["encoder.head"], 2), (["encoder"], 1), (["encoder.first"], 2)],
)
def test_names_stay_absolute_across_graph_breaks(skip: list[str], expected: int) -> None:
    with torch.no_grad():
        assert _int8_calls(compiled(Broken(), skip=skip), torch.randn(4, 8)) == expected


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"'lmhead' matches nothing; there is: .*lm_head"),
    ):
        compiled(Block(), skip=["lmhead"])(X)


def test_an_unknown_option_is_an_error() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="unknown option 'minimal_gain'"):
        torch.compile(Block(), backend=compile_with_qfx, options={"minimal_gain": 0})(X)


def test_a_fault_of_the_pass_leaves_the_graph_float(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise KeyError("what was that")

    monkeypatch.setattr("qfx.rewriting.fusion.emit", broken)
    model = Block()
    phrase = "left it float, at node linear_dequantize: KeyError: 'what was that'"
    with torch.no_grad(), pytest.warns(UserWarning, match=phrase):
        assert torch.equal(compiled(model)(X), model(X))


def test_a_fault_of_the_plan_names_its_node(use_costs: UseCosts) -> None:
    """Also one of arithmetic, which a cost model may make."""

    class Broken(MachineCost):
        def estimate(self, *problem: Any) -> Estimate:
            return 1 // 0  # type: ignore[return-value]

    use_costs(Broken())
    model = nn.Linear(8, 8)
    phrase = "left it float, at node .*: ZeroDivisionError"
    by_gain = torch.compile(model, backend="qfx", options={"inner": "eager"})
    with torch.no_grad(), pytest.warns(UserWarning, match=phrase):
        assert torch.equal(by_gain(X[..., :8]), model(X[..., :8]))


def test_faults_of_the_inner_compiler_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gm: object, inputs: object) -> None:
        raise RuntimeError("inner trouble")

    monkeypatch.setattr("qfx.dynamo_backend.backend._run_as_it_is", broken)
    with torch.no_grad(), pytest.raises(Exception, match="inner trouble"):
        compiled(Block())(X)


def test_regional_compilation_serves_every_layer() -> None:
    torch.manual_seed(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(self.a(x))

    layers = [Layer() for _ in range(4)]
    x = torch.randn(4, 8)
    options = {"minimum_gain": 0, "scheme": "w8a8-asymmetric", "inner": "eager"}
    with torch.no_grad():
        for layer in layers:
            expected = layer(x)
            f = torch.compile(layer, backend=compile_with_qfx, options=options)
            assert sqnr(expected, f(x)) > 30
            assert _int8_calls(f, x) == 1


def test_mode_and_inductor_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any] | None] = []

    def fake_compile_fx(gm: Any, inputs: Any, config_patches: dict[str, Any] | None) -> Any:
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fake_compile_fx)
    with torch.no_grad():
        torch.compile(Block(), backend=compile_with_qfx, mode="max-autotune-no-cudagraphs")(X)
        torch._dynamo.reset()
        torch.compile(Block(), backend=compile_with_qfx, options={"cpp_wrapper": True})(X)
    assert seen[0] is not None and seen[0]["max_autotune"] is True
    assert seen[1] is not None and seen[1].items() >= {
        "size_asserts": False, "cpp_wrapper": True,
    }.items()  # fmt: skip


def test_a_filter_of_guards_reaches_dynamo_and_explain_takes_the_same_options() -> None:
    kept: list[str] = []

    def no_globals(entries: Any) -> list[bool]:
        kept.extend(entry.guard_type for entry in entries if not entry.is_global)
        return torch.compiler.skip_guard_on_globals_unsafe(entries)  # type: ignore[no-any-return]

    options = {"minimum_gain": 0, "inner": "eager", "guard_filter_fn": no_globals}
    assert qfx.explain(Block(), X, options=options).quantized
    with torch.no_grad():
        torch.compile(Block(), backend=compile_with_qfx, options=options)(X)
    assert "TENSOR_MATCH" in kept


def test_checkpoint_bodies_run_in_float() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=False))

    model, x = Checkpointed(), torch.randn(4, 8)
    with torch.no_grad():
        y = compiled(model, inner="aot_eager")(x)
        assert sqnr(model(x), y) > 30


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vmap behind grad": lambda f, x: torch.func.vmap(
        lambda row: f(torch.func.grad(lambda y: y.sin().sum())(row))
    )(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms_stay_float(name: str) -> None:
    linear, x = nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 8)

    def function(x: Tensor) -> Tensor:
        return TRANSFORMS[name](lambda y: y + linear(y), x)

    options = {"minimum_gain": 0, "inner": "aot_eager"}
    with torch.no_grad():
        y = torch.compile(function, backend=compile_with_qfx, options=options)(x)
        assert torch.allclose(y, function(x), atol=1e-5)


def test_a_transform_leaves_the_matmuls_outside_it_int8() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)

    def function(x: Tensor) -> Tensor:
        return linear(torch.func.vmap(torch.sin)(x))

    with torch.no_grad():
        assert _int8_calls(compiled(function), x) == 1


def test_forward_mode_tangents_are_an_error() -> None:
    import torch.autograd.forward_ad as forward_ad

    linear, x = nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 8)
    f = compiled(linear)
    f(x)
    with forward_ad.dual_level():
        f(x)
        with pytest.raises(
            NotImplementedError,
            match=r"input \d of a graph with int8 matmuls carries a forward-mode tangent",
        ):
            f(forward_ad.make_dual(x, torch.ones_like(x)))
