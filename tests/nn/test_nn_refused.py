"""Linears that no module can replace are refused by name, before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune

import qfx
from qfx.host.modules import STATE_HOOKS
from qfx.ops.single_tensors import sqnr
from tests.lib.pairs import every
from tests.lib.prepared import BY_EACH, NEW, PREPARE, REPLACE, TRAINED, K, X, model


def _pruned(linear: nn.Linear, name: str) -> None:
    prune.l1_unstructured(linear, name, 0.5)


def _no_parameter(linear: nn.Linear) -> None:
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = weight


def _flat(linear: nn.Linear) -> None:
    linear.weight, linear.bias = nn.Parameter(linear.weight.detach()[0]), None


class Half(ModelHook):
    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output / 2


def _own_forward(linear: nn.Linear) -> None:
    linear.forward = lambda x: torch.zeros(len(x), K)  # type: ignore[method-assign]


def _old_backward_hook(linear: nn.Linear) -> None:
    linear.register_backward_hook(lambda *_: None)


def _kept_method(linear: nn.Linear) -> None:
    linear.before = linear.forward


# row -> what is done to the linear, what the error says, what undoes it
OBSTACLES: dict[str, tuple[Callable[[nn.Linear], Any], str, Callable[[nn.Linear], Any] | None]] = {
    "weight_norm": (
        nn.utils.weight_norm,
        r"weight_norm computes its weight before each call: torch.nn.utils.remove_weight_norm\(mod",
        nn.utils.remove_weight_norm,
    ),
    "weight_norm of the bias": (
        lambda m: nn.utils.weight_norm(m, "bias", dim=None),
        "weight_norm computes its bias before each call",
        lambda m: nn.utils.remove_weight_norm(m, "bias"),
    ),
    "spectral_norm": (
        nn.utils.spectral_norm,
        r"spectral_norm computes its weight before each call: torch.nn.utils.remove_spectral_norm",
        nn.utils.remove_spectral_norm,
    ),
    "pruning": (
        lambda m: _pruned(m, "weight"),
        r"pruning computes its weight before each call: torch.nn.utils.prune.remove\(module, 'wei",
        lambda m: prune.remove(m, "weight"),
    ),
    "pruning twice": (
        lambda m: (_pruned(m, "weight"), _pruned(m, "weight")),
        "pruning computes its weight",
        lambda m: prune.remove(m, "weight"),
    ),
    "pruning of the bias": (
        lambda m: _pruned(m, "bias"),
        "pruning computes its bias before each call",
        lambda m: prune.remove(m, "bias"),
    ),
    "a weight that is an attribute": (
        _no_parameter,
        "its weight is no parameter but an attribute",
        lambda m: setattr(m, "weight", nn.Parameter(m.weight)),
    ),
    "a weight that is no matrix": (_flat, r"its weight has shape \[32\], not \[N, K\]", None),
    "accelerate's hooks": (
        lambda m: add_hook_to_module(m, Half()),
        "accelerate has replaced its forward: accelerate.hooks.remove_hook_from_module",
        remove_hook_from_module,
    ),
    "accelerate's offload": (
        lambda m: accelerate.cpu_offload(m, torch.device("cpu")),
        "accelerate has replaced its forward",
        remove_hook_from_module,
    ),
    "a forward of its own": (
        _own_forward,
        "its forward is its own, not that of nn.Linear",
        lambda m: delattr(m, "forward"),
    ),
    "compiled by itself": (
        lambda m: m.compile(backend="eager"),
        "its _compiled_call_impl is its own",
        lambda m: delattr(m, "_compiled_call_impl"),
    ),
    "a method kept": (
        _kept_method,
        "its attribute 'before' is a method of it",
        lambda m: delattr(m, "before"),
    ),
    "a name that is taken": (
        lambda m: [setattr(m, name, 1) for name in ("_memo", "scheme", "axes")],
        "its attribute '(_memo|scheme|axes)' would hide that of the module in its place",
        lambda m: [delattr(m, name) for name in ("_memo", "scheme", "axes")],
    ),
    "register_backward_hook": (
        _old_backward_hook,
        "register_backward_hook gave it a hook.*use register_full_backward_hook",
        lambda m: m._backward_hooks.clear(),
    ),
    **{
        registry: (
            lambda m, registry=registry: getattr(m, registry).update({0: lambda *_: None}),
            "it has hooks on its state dict",
            lambda m, registry=registry: getattr(m, registry).clear(),
        )
        for registry in STATE_HOOKS
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*weights? norm")
@pytest.mark.parametrize("row, how", every(OBSTACLES, PREPARE))
def test_obstacles_are_refused_by_name_and_nothing_is_changed(row: str, how: str) -> None:
    attach, phrase, undo = OBSTACLES[row]
    m = model()
    attach(m[2])  # type: ignore[arg-type]
    before = [{n: v for n, v in vars(part).items() if "hook" in n} for part in m]
    said = "quantize_" if how == "quantize_" else how.split(",")[0]
    with pytest.raises(ValueError, match=rf"(?s)^{said}: 1 of 2 .*\n  2: .*{phrase}.*skip=\['2'\]"):
        PREPARE[how](m)
    assert [type(part) for part in m] == [nn.Linear, nn.GELU, nn.Linear]
    assert [{n: v for n, v in vars(p).items() if "hook" in n} for p in m] == before
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PREPARE[how](m, qfx.Config(skip=("2",)))
    assert type(m[0]) in NEW and type(m[2]) is nn.Linear
    if undo is not None:
        undo(m[2])  # type: ignore[arg-type]
        linear, x = m[2], m[1](m[0](X)).detach()
        PREPARE[how](m)
        assert type(m[2]) in NEW
        assert how == "prepare_binary" or sqnr(linear(x).detach(), m[2](x).detach()) > 25


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*weights? norm")
@pytest.mark.parametrize(
    "row, how", every([row for row in OBSTACLES if row != "a name that is taken"], TRAINED)
)
def test_obstacles_that_came_while_it_trained(row: str, how: str) -> None:
    attach, phrase, undo = OBSTACLES[row]
    m: Any = PREPARE[how](model())
    attach(m[2])
    before = [dict(vars(part)) for part in m]
    phrase = phrase.replace("nn.Linear", type(m[2]).__name__)
    with pytest.raises(ValueError, match=rf"(?s)^convert: 1 of 2 .*\n  2: .*{phrase}.*$"):
        qfx.convert(m)
    assert [dict(vars(part)) for part in m] == before
    if undo is not None:
        undo(m[2])
        expected = m.eval()(X)
        assert torch.equal(qfx.convert(m)(X), expected) and type(m[2]) in NEW


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_all_obstacles_are_in_one_message() -> None:
    m = nn.Sequential(*(nn.Linear(K, K) for _ in range(30)))
    for linear in m[:26]:
        nn.utils.weight_norm(linear)
    add_hook_to_module(m[26], Half())
    with pytest.raises(ValueError) as error:
        qfx.quantize_(m)
    text = str(error.value)
    assert (
        "27 of 30 linears" in text and "0, 1, 2, 3, 4" in text and "19 and 6 more: weight" in text
    )
    assert "\n  26: accelerate" in text and "'25', '26']" in text


@BY_EACH
def test_models_that_fsdp_shards_are_refused(how: str, one_rank: Any) -> None:
    m = model()
    fully_shard(m[0], mesh=one_rank)
    with pytest.raises(ValueError, match=r"FSDP shards .* shard the model afterwards"):
        REPLACE[how](m)
    m = REPLACE[how](model())
    expected = m(X).detach()
    assert torch.equal(fully_shard(m, mesh=one_rank)(X), expected)


def test_weights_that_accelerate_loads_for_a_block_are_refused() -> None:
    """The linears have no hook then, and no weight either."""
    m = nn.Sequential(model())
    accelerate.cpu_offload(m, torch.device("cpu"), preload_module_classes=["Sequential"])
    assert m[0][0].weight.is_meta and not hasattr(m[0][0], "_hf_hook")
    with pytest.raises(ValueError, match=r"0\.0, 0\.2: accelerate keeps its weight elsewhere"):
        qfx.quantize_(m)


def test_accelerate_dispatches_quantized_models() -> None:
    """As the message says: quantize first, then dispatch."""
    m = qfx.quantize_(model())
    expected = m(X).detach()
    accelerate.dispatch_model(m, {"": "cpu"}, force_hooks=True)
    assert torch.equal(m(X), expected)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_accelerate_is_told_that_codes_are_not_offloaded(offload: str, tmp_path: Any) -> None:
    """It would look for a weight in the state dict, which has codes."""
    m, cpu = qfx.quantize_(model()), torch.device("cpu")
    with pytest.raises(ValueError, match="does not offload int8 weights"):
        if offload == "disk":
            accelerate.disk_offload(m, str(tmp_path), cpu)
        else:
            accelerate.cpu_offload(m, cpu)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("make", [c.from_float for c in NEW])
def test_from_float_takes_no_stale_weight(make: Any) -> None:
    for attach in (nn.utils.weight_norm, parametrizations.weight_norm):
        with pytest.raises(ValueError, match=r"cannot be taken over, .*weight"):
            make(attach(nn.Linear(K, K)))
