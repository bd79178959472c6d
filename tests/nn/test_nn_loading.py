"""State dicts of whole models, and of modules that train: refused before anything is taken."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.nn import BinaryLinear, LSQLinear
from tests.nn.test_nn_linear import X, outputs
from tests.nn.test_nn_state import State, same, saved

# --- a whole model ---


def model(scheme: qfx.Scheme | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.Linear(32, 8)
    )
    config = qfx.Config(scheme=scheme or qfx.Scheme(), skip=("2",))
    return nn.ModuleDict({"body": qfx.quantize_(layers, config)})


def _changed(name: str, change: Callable[[Tensor], Any]) -> State:
    state = {
        n: -v if v.is_floating_point() and n.endswith("weight") else v
        for n, v in saved(model()).items()
    }
    change(state[name])
    return state


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda m: m,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("kept", COPIES)
def test_a_refused_state_dict_leaves_the_whole_model(kept: str) -> None:
    """What is wrong is in the last module; those before it, float ones too, stay as they were."""
    first = COPIES[kept](model())
    state = _changed("body.3.scale", lambda scale: scale.neg_())
    before = saved(first)
    with pytest.raises(RuntimeError, match=r"nothing was loaded:\n\tbody.3.scale holds -"):
        first.load_state_dict(state)
    assert same(saved(first), before)
    state["body.3.scale"].neg_()
    first.load_state_dict(state)
    assert same(saved(first), state)


def test_all_that_is_wrong_is_said_at_once_and_by_one_check() -> None:
    first = model()["body"]  # type: ignore[index]
    qfx.quantize_(first, qfx.Config(only=("2",)))
    assert len(first._load_state_dict_pre_hooks) == 1
    state = {n: v.neg() if n.endswith("scale") else v for n, v in saved(first).items()}
    with pytest.raises(RuntimeError) as raised:
        first.load_state_dict(state)
    lines = str(raised.value).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["0.scale", "2.scale", "3.scale"]


def test_missing_modules_are_reported_as_torch_does() -> None:
    first = model()
    state = {n: v for n, v in saved(first).items() if not n.startswith("body.3.")}
    found = first.load_state_dict(state, strict=False)
    assert sorted(found.missing_keys) == [
        f"body.3.{n}" for n in ("bias", "codes", "scale", "scheme")
    ]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "body.3.scheme", '):
        first.load_state_dict(state)


def test_meta_modules_take_values_only_by_assigning() -> None:
    first, second = model(), model().to("meta")
    with pytest.raises(
        RuntimeError, match=r"the module is on the meta device; load_state_dict with"
    ):
        second.load_state_dict(saved(first))
    second.load_state_dict(second.state_dict())
    second.load_state_dict(saved(first), assign=True)
    assert same(saved(second), saved(first))


# --- modules that train ---

TRAINED: dict[str, Callable[[], nn.Module]] = {
    str(s): lambda s=s: LSQLinear(24, 16, scheme=s)  # type: ignore[misc]
    for s in (
        qfx.Scheme(),
        qfx.Scheme(w=qfx.QSpec(bits=4)),
        qfx.Scheme(x=qfx.QSpec(bits=4, axes=qfx.PER_TENSOR), w=qfx.QSpec(4, axes=qfx.PER_TENSOR)),
        qfx.Scheme(x=qfx.QSpec(bits=8, axes=qfx.PER_TENSOR), w=qfx.QSpec(4, axes=qfx.PER_TENSOR)),
        qfx.Scheme(x=qfx.QSpec(symmetric=False)),
        qfx.Scheme(backward="int8"),
    )
} | {
    "binary per row": lambda: BinaryLinear(24, 16),
    "binary per tensor": lambda: BinaryLinear(24, 16, axes=qfx.PER_TENSOR),
}  # fmt: skip


def trained(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module: Any = TRAINED[name]()
    module.observe(X[..., :24])
    return module.eval()


@pytest.mark.parametrize("name", TRAINED)
def test_trained_modules_load_what_was_trained_alike(name: str) -> None:
    """The mode of gradients is no part of it."""
    first, alike = trained(name, 0), []
    for other in TRAINED:
        second = trained(other, 1)
        before = saved(second)
        try:
            second.load_state_dict(saved(first))
        except RuntimeError:
            assert same(saved(second), before)
            continue
        alike.append(other)
        assert torch.equal(outputs(second, X[..., :24]), outputs(first, X[..., :24]))
    assert [other.removesuffix("_g8") for other in alike] == [name.removesuffix("_g8")] * len(alike)
    assert name in alike


def test_steps_without_a_scheme_are_refused_and_float_weights_taken() -> None:
    module = trained("xs4t_ws4t", 0)
    state = saved(module)
    del state["scheme"]
    with pytest.raises(RuntimeError, match=r"which scheme w_log_step and x_log_step were made"):
        module.load_state_dict(state, strict=False)
    linear = nn.Linear(24, 16)
    found = module.load_state_dict(linear.state_dict(), strict=False)
    assert sorted(found.missing_keys) == ["scheme", "w_log_step", "x_log_step"]
    assert torch.equal(module.weight, linear.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name, value, phrase",
    [
        ("w_log_step", torch.full((1, 1), torch.inf), "w_log_step holds inf, no logarithm"),
        ("x_log_step", torch.ones(1).int(), r"x_log_step is torch.int32 \[1\], expected"),
        ("x_log_step", torch.ones(2), r"x_log_step is torch.float32 \[2\], expected"),
    ],
)
def test_steps_are_checked_before_anything_changes(name: str, value: Tensor, phrase: str) -> None:
    module = trained("xs4t_ws4t", 0)
    state = saved(trained("xs4t_ws4t", 1)) | {name: value}
    before = saved(module)
    with pytest.raises(RuntimeError, match=phrase):
        module.load_state_dict(state)
    assert same(saved(module), before)
