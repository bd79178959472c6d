"""PEFT's LoRA layers around int8 linears: one update (T4), which falls back to PEFT's own forward
pass for all that it does not know, and is in nobody's way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import qfx
from qfx.nn import fused_lora
from qfx.nn.fused_lora import FusedLora
from qfx.nn.lora_update import lora_update
from tests.lib.models import compiled

X = torch.randn(3, 17, 128, generator=torch.Generator().manual_seed(0))
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 96))


def adapted(base: nn.Module, **more: Any) -> Any:
    made = get_peft_model(base, LoraConfig(**{"r": 8, "target_modules": ["0", "2"], **more}))
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # zeros at first, behind which nothing has a gradient
            nn.init.normal_(parameter, std=0.05)
    return made.train()


def model(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return adapted(qfx.quantize_(net().to(dtype)), **more)


def layer(made: Any) -> Any:
    return made.base_model.model[0]


def in_peft(made: Any) -> Any:
    """A copy whose adapters PEFT computes."""
    other = copy.deepcopy(made)
    for module in other.modules():
        if type(module) is FusedLora:
            module.__class__ = LoraLinear
    return other


def results(made: Any, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of all that trains."""
    torch.manual_seed(2)
    x = x.clone().requires_grad_()
    y = made(x)
    y.float().square().sum().backward()
    return [y, x.grad, *gradients(made)]


def gradients(made: Any) -> list[Tensor]:
    return [p.grad for p in made.parameters() if p.requires_grad]


def closeness(made: Any, x: Tensor, within: float) -> None:
    for mine, theirs in zip(results(made, x), results(in_peft(made), x), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert (mine - theirs).norm() <= within * theirs.norm()


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each update, whether it overwrites the output of the base."""
    seen: list[bool] = []

    def counted(*args: Any, overwrite: bool = False) -> Tensor:
        seen.append(overwrite)
        return lora_update(*args, overwrite=overwrite)

    monkeypatch.setattr(fused_lora, "lora_update", counted)
    return seen


@given(
    st.integers(0, 5), st.integers(1, 40), st.integers(1, 40), st.integers(1, 9),
    st.sampled_from([*ROUNDING]), st.booleans(),
)  # fmt: skip
def test_update_and_gradients_are_within_their_bounds(
    m: int, k: int, n: int, r: int, dtype: torch.dtype, overwrite: bool
) -> None:
    """(T4): against float64, with the bounds of sums of products of rounded factors."""
    draw = torch.Generator().manual_seed(m + 10 * k + 1000 * n)
    y, x, g = (torch.randn(2, m, f, generator=draw).to(dtype) for f in (n, k, n))
    a, b = (torch.randn(*s, generator=draw).requires_grad_() for s in ((r, k), (n, r)))
    x.requires_grad_()
    found = lora_update(y.clone(), x, a, b, 0.75, overwrite)
    grads = torch.autograd.grad(found, (x, a, b), g)
    gx, ga, gb, gy, gg = (t.detach().double() for t in (x, a, b, y, g))
    rows, of_g = gx.flatten(0, 1), gg.flatten(0, 1)
    terms = [
        (found, lambda x, a, b, y, g: y + 0.75 * (x @ a.mT) @ b.mT),
        (grads[0], lambda x, a, b, y, g: 0.75 * (g @ b) @ a),
        (grads[1], lambda x, a, b, y, g: 0.75 * (g @ b).mT @ x),
        (grads[2], lambda x, a, b, y, g: 0.75 * g.mT @ (x @ a.mT)),
    ]
    slack = (k + n + r + 2 * m + 16) * 2.0**-24 + 8 * ROUNDING[dtype]
    smallest = 64 * torch.finfo(dtype).tiny
    values = (rows, ga, gb, gy.flatten(0, 1), of_g)
    for mine, formula in terms:
        exact, most = formula(*values), formula(*(v.abs() for v in values))
        assert ((mine.detach().double().reshape(exact.shape) - exact).abs()
                <= slack * most + smallest).all()  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"lora_dropout": 0.3}, {"use_rslora": True, "r": 16}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_as_in_peft(dtype: torch.dtype, more: dict[str, Any], updates: list[bool]) -> None:
    """PEFT computes the adapters of a bfloat16 base in float32; the update, in bfloat16."""
    closeness(model(dtype, **more), X.to(dtype), 1e-5 if dtype == torch.float32 else 0.02)
    assert updates == [True, True]


@pytest.mark.parametrize("shape", [(128,), (0, 128), (1, 128), (2, 3, 4, 128)])
def test_shapes_of_x(shape: tuple[int, ...]) -> None:
    made, x = model(), torch.randn(shape)
    closeness(made, x, 1e-5)
    with torch.inference_mode():
        assert torch.allclose(made(x), in_peft(made)(x), atol=1e-5)


def test_under_autocast() -> None:
    made = model()
    with torch.autocast("cpu", torch.bfloat16):
        closeness(made, X, 0.02)
        assert made(X).dtype == torch.bfloat16


def test_several_adapters_at_once(updates: list[bool]) -> None:
    made = model()
    made.add_adapter("other", LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))
    made.base_model.set_adapter(["default", "other"])
    closeness(made, X, 1e-5)
    assert len(updates) == 3


def _hook(*_: Any) -> None:
    return None


def _replace_forward(module: nn.Module) -> None:
    module.forward = module.forward


PEFTS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "DoRA": ({"use_dora": True}, lambda made: None),
    "a bias": ({"lora_bias": True}, lambda made: None),
    "merged": ({}, lambda made: layer(made).merge()),
    "disabled": ({}, lambda made: layer(made).enable_adapters(False)),
    "a hook": ({}, lambda made: layer(made).lora_A["default"].register_forward_hook(_hook)),
    "a hook on gradients": (
        {},
        lambda made: layer(made).lora_B["default"].register_full_backward_hook(_hook),
    ),
    "a forward of its own": ({}, lambda made: _replace_forward(layer(made).lora_A["default"])),
    "parametrized": (
        {},
        lambda made: nn.utils.parametrizations.weight_norm(layer(made).lora_A["default"]),
    ),
}


@pytest.mark.parametrize("name", PEFTS)
def test_what_peft_itself_computes(name: str, updates: list[bool]) -> None:
    more, change = PEFTS[name]
    made = model(target_modules=["0"], **more)
    change(made)
    results(made, X)
    assert not updates


def test_a_float16_base_has_adapters_of_float32(updates: list[bool]) -> None:
    """As PEFT makes them: small gradients would be zero in float16."""
    made = model(torch.float16, target_modules=["0"])
    results(made, X.half())
    assert layer(made).lora_A["default"].weight.dtype == torch.float32 and not updates


def test_hooks_on_all_modules_see_the_calls_of_peft(updates: list[bool]) -> None:
    made, seen = model(target_modules=["0"]), []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        made(X)
    finally:
        handle.remove()
    assert layer(made).lora_A["default"] in seen and not updates


def test_traced() -> None:
    made = layer(model())
    with torch.no_grad():
        assert torch.allclose(torch.jit.trace(made, X)(X), made(X), atol=1e-5)


def test_adapters_stay_float_when_the_model_is_quantized() -> None:
    """They train, and PEFT saves and loads them."""
    made = adapted(net(), r=64)
    before = sum(p.numel() for p in made.parameters() if p.requires_grad)
    qfx.quantize_(made)
    assert sum(p.numel() for p in made.parameters() if p.requires_grad) == before
    assert type(layer(made).base_layer) is qfx.nn.Linear
    assert all(type(part) is nn.Linear for part in (*layer(made).lora_A.values(),))


def test_batches_of_several_adapters(updates: list[bool]) -> None:
    made = model(target_modules=["0"]).eval()
    made.add_adapter("other", LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))
    names = ["default", "__base__", "other"]
    with torch.no_grad():
        assert (
            torch.equal(made(X, adapter_names=names), in_peft(made)(X, adapter_names=names))
            and not updates
        )


@pytest.mark.parametrize("replaced", [False, True])
def test_who_sees_the_output_of_the_base_keeps_it(replaced: bool, updates: list[bool]) -> None:
    made, seen = model(target_modules=["0"]), []
    base = layer(made).base_layer
    if replaced:
        forward = base.forward
        base.forward = lambda x: seen.append(forward(x)) or seen[-1]
    else:
        base.register_forward_hook(lambda *call: seen.append(call[-1]))
    closeness(made, X, 1e-5)
    assert updates == [False] and torch.equal(seen[0], seen[1])


def test_whichever_comes_first() -> None:
    """Quantized before or after PEFT, added later, around a layer that stays float."""
    late = qfx.quantize_(adapted(net()), qfx.Config(skip=["lora_*"]))
    assert [type(module) is FusedLora for module in (layer(late), layer(model()))] == [True, True]
    made = model(target_modules=["0"])
    made.add_adapter("other", LoraConfig(r=4, target_modules=["2"]))
    assert type(made.base_model.model[2]) is FusedLora
    part = adapted(qfx.quantize_(net(), qfx.Config(skip=["2"])))
    assert type(part.base_model.model[2]) is LoraLinear


def test_copied_pickled_saved_and_taken_out(tmp_path: Path) -> None:
    made = model().eval()
    expected = made(X)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(X), expected) and type(layer(other)) is FusedLora
    made.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(qfx.quantize_(net()), tmp_path).eval()
    assert torch.equal(loaded(X), expected)
    base = qfx.quantize_(net())
    assert torch.equal(made.unload()(X), base(X))


def test_what_follows_may_be_in_place() -> None:
    made = model()
    y = made(X)
    y.add_(1).mul_(2)
    y.sum().backward()
    assert layer(made).lora_A["default"].weight.grad.norm() > 0


def test_checkpointed_and_accumulated() -> None:
    made = model()
    once = [grad.clone() for grad in results(made, X)[2:]]
    results(made, X)
    for grad, of_one in zip(gradients(made), once, strict=True):
        assert torch.allclose(grad, 2 * of_one, rtol=1e-4, atol=1e-4)
    made.zero_grad()
    checkpoint(made, X, use_reentrant=False).square().sum().backward()
    assert all(
        torch.equal(grad, of_one) for grad, of_one in zip(gradients(made), once, strict=True)
    )


def test_no_second_derivative() -> None:
    made = model(target_modules=["0"])
    a = layer(made).lora_A["default"].weight
    (grad,) = torch.autograd.grad(made.base_model.model[0](X).square().sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match="LoRA adapter has no second derivative"):
        grad.sum().backward()


def test_compiled() -> None:
    made = model()
    mine = compiled(made, skip=["lora_A", "lora_B"])(X)
    assert torch.allclose(mine, made(X), atol=1e-4)


def test_its_input_is_saved_in_int8_and_in_the_dtype_of_the_base() -> None:
    """A bfloat16 base: PEFT keeps a float32 copy of x for each adapter."""
    made, x = model(torch.bfloat16), torch.randn(512, 128).bfloat16()
    of_x = x.numel() * 2
    mine, theirs = (qfx.saved_tensors(m, x).bytes for m in (made, in_peft(made)))
    assert theirs - mine >= of_x
    exact = results(made, x)
    with qfx.save_in_int8():
        noisy = results(made, x)
    assert torch.equal(exact[0], noisy[0])
    assert torch.cosine_similarity(exact[2].ravel(), noisy[2].ravel(), 0) > 0.99
