"""What users gave a linear, and what becomes of it in quantize_, prepare_qat and prepare_binary."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

import qfx
from qfx.nn.carry import CALL_HOOKS, STATE_HOOKS
from qfx.row import sqnr

K = 32
X = torch.randn(6, K, generator=torch.Generator().manual_seed(0))
TENSOR = qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR))
NEW = (qfx.nn.Linear, qfx.nn.LSQLinear, qfx.nn.BinaryLinear)
Prepare = Callable[..., nn.Module]
PREPARE: dict[str, Prepare] = {
    "quantize_": qfx.quantize_,
    "prepare_qat": lambda m, config=None: qfx.prepare_qat(m, X, config=config),
    "prepare_qat, learned": lambda m, config=None: qfx.prepare_qat(
        m, X, config=config or qfx.Config(scheme=TENSOR)
    ),
    "prepare_binary": lambda m, config=None: qfx.prepare_binary(m, X, config=config),
}
BY_ALL = pytest.mark.parametrize("how", PREPARE)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, K), nn.GELU(), nn.Linear(K, K))


# --- hooks: attached before or after the replacement, they do the same ---


def _doubled(log: list[str]) -> Any:
    return lambda module, args, y: log.append("forward") or 2 * y


def _doubled_with_keywords(log: list[str]) -> Any:
    return lambda module, args, keywords, y: log.append(f"forward {len(keywords)}") or y + 1


def _shifted(log: list[str]) -> Any:
    return lambda module, args: log.append("pre") or (args[0] + 0.5 if args else args)


def _as_keyword(log: list[str]) -> Any:
    """Linears may be called by keyword from then on."""
    return lambda module, args, keywords: (
        log.append("pre with keywords") or ((), {"input": args[0] if args else keywords["input"]})
    )


def _backward(log: list[str]) -> Any:
    return lambda module, dx, dy: log.append(f"backward {len(dx)} {len(dy)}")


def _before_backward(log: list[str]) -> Any:
    return lambda module, dy: log.append("before backward") or (3 * dy[0],)


HOOKS: dict[str, Callable[[nn.Module, list[str]], Any]] = {
    "forward": lambda m, log: m.register_forward_hook(_doubled(log)),
    "forward, first": lambda m, log: m.register_forward_hook(_doubled(log), prepend=True),
    "forward with keywords": lambda m, log: m.register_forward_hook(
        _doubled_with_keywords(log), with_kwargs=True
    ),
    "forward, always": lambda m, log: m.register_forward_hook(_doubled(log), always_call=True),
    "pre": lambda m, log: m.register_forward_pre_hook(_shifted(log)),
    "pre, first": lambda m, log: m.register_forward_pre_hook(_shifted(log), prepend=True),
    "pre with keywords": lambda m, log: m.register_forward_pre_hook(
        _as_keyword(log), with_kwargs=True
    ),
    "backward": lambda m, log: m.register_full_backward_hook(_backward(log)),
    "before backward": lambda m, log: m.register_full_backward_pre_hook(_before_backward(log)),
}


def observed(f: nn.Module, log: list[str]) -> tuple[Tensor, Tensor, list[str]]:
    """Output, gradient of the input, and which hooks ran, also when the input is wrong."""
    log.clear()
    x = X.clone().requires_grad_()
    y = f(x)
    y.square().sum().backward()
    with pytest.raises(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f(X[:, :5])
    assert x.grad is not None
    return y.detach(), x.grad, list(log)


@given(
    st.sampled_from(sorted(PREPARE)),
    st.lists(st.tuples(st.sampled_from(sorted(HOOKS)), st.sampled_from([0, 2])), max_size=5),
    st.data(),
)
def test_hooks_go_over_in_order_and_their_handles_remove_them(
    how: str, hooks: list[tuple[str, int]], data: st.DataObject
) -> None:
    log: list[str] = []
    before, after = model(), model()
    handles = [HOOKS[name](before[at], log) for name, at in hooks]
    PREPARE[how](before)
    PREPARE[how](after)
    after.load_state_dict(before.state_dict())  # steps are fitted to what hooks make of inputs
    plain = observed(after, log)
    late = [HOOKS[name](after[at], log) for name, at in hooks]
    gone = data.draw(st.sets(st.sampled_from(range(len(hooks))))) if hooks else set()
    for i in gone:
        handles[i].remove()
        late[i].remove()
    _same(observed(before, log), observed(after, log))
    for handle in handles:
        handle.remove()
    _same(observed(before, log), plain)
    assert all(type(before[i]) in NEW for i in (0, 2))


def _same(a: Any, b: Any) -> None:
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]


def test_every_hook_of_torch_is_thought_of() -> None:
    assert {n for n in vars(nn.Module()) if "hook" in n} == {*CALL_HOOKS, *STATE_HOOKS}


# --- attributes ---


def give(linear: nn.Linear) -> None:
    linear._is_hf_initialized = True  # type: ignore[assignment]
    linear.note = {"kept": 1}  # type: ignore[assignment]
    linear.register_buffer("count", torch.zeros(2))
    linear.register_buffer("hidden", torch.ones(1), persistent=False)
    linear.gain = nn.Parameter(torch.full((1,), 2.0))
    linear.adapter = nn.Linear(K, K)
    linear.register_forward_hook(lambda m, args, y: m.gain * y + m.adapter(args[0]))


@BY_ALL
def test_attributes_tensors_and_children_go_over(how: str) -> None:
    m = model()
    give(m[0])  # type: ignore[arg-type]
    old, handed = m[0], (m[0].gain, m[0].count, m[0].hidden)
    m[0].eval()
    PREPARE[how](m)
    new: Any = m[0]
    assert new is not old and (new.gain, new.count, new.hidden) == handed and not new.training
    assert new._is_hf_initialized and new.note is old.note
    assert type(new) in NEW and type(new.adapter) is type(new)
    assert {"0.count", "0.gain"} <= m.state_dict().keys() and "0.hidden" not in m.state_dict()
    assert copy.deepcopy(m)(X).equal(m(X))


@BY_ALL
def test_shared_modules_are_replaced_once_with_their_hooks(how: str) -> None:
    shared = nn.Linear(K, K)
    m = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Sequential(shared))})
    m["c"] = m["b"]  # the parent has two names as well
    calls: list[int] = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    m.forward = lambda x: m["b"](m["a"](x))  # type: ignore[method-assign]
    PREPARE[how](m)
    calls.clear()
    m(X)
    assert m["a"] is m["b"][0] is m["b"][1][0] is m["c"][0] and len(calls) == 3
    assert type(m["a"]) in NEW


@BY_ALL
def test_features_are_those_of_the_weight(how: str) -> None:
    """Whoever cuts features off a layer seldom tells its attributes."""
    m = model()
    m[0].weight = nn.Parameter(m[0].weight[:, :24])
    x, made = X[:, :24], m
    prepare = {"prepare_binary": qfx.prepare_binary, "quantize_": lambda m, x: qfx.quantize_(m)}
    made = prepare.get(how, qfx.prepare_qat)(m, x)
    assert made[0].in_features == 24 and made(x).shape == (6, K)


@BY_ALL
def test_modules_may_be_called_by_keyword(how: str) -> None:
    m = PREPARE[how](model())
    assert torch.equal(m[0](input=X), m[0](X))


@BY_ALL
def test_random_numbers_are_not_touched(how: str) -> None:
    m, before = model(), torch.get_rng_state()
    PREPARE[how](m)
    assert torch.equal(torch.get_rng_state(), before)


# --- what cannot go over ---


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
@BY_ALL
@pytest.mark.parametrize("row", OBSTACLES)
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


@BY_ALL
def test_models_that_fsdp_shards_are_refused(how: str, one_rank: Any) -> None:
    m = model()
    fully_shard(m[0], mesh=one_rank)
    with pytest.raises(ValueError, match=r"FSDP shards .* shard the model afterwards"):
        PREPARE[how](m)
    m = PREPARE[how](model())
    expected = m(X).detach()
    assert torch.equal(fully_shard(m, mesh=one_rank)(X), expected)


def test_weights_that_accelerate_loads_for_a_block_are_refused() -> None:
    """The linears have no hook then, and no weight either."""
    m = nn.Sequential(model())
    accelerate.cpu_offload(m, torch.device("cpu"), preload_module_classes=["Sequential"])
    assert m[0][0].weight.is_meta and not hasattr(m[0][0], "_hf_hook")
    with pytest.raises(ValueError, match=r"0\.0, 0\.2: accelerate keeps its weight elsewhere"):
        qfx.quantize_(m)


@pytest.mark.parametrize("offload", ["cpu", "cpu with buffers", "dispatch", "disk"])
def test_accelerate_takes_quantized_models(offload: str, tmp_path: Any) -> None:
    """As the message says: quantize first, then dispatch or offload."""
    m = qfx.quantize_(model())
    expected, cpu = m(X).detach(), torch.device("cpu")
    if offload == "dispatch":
        accelerate.dispatch_model(m, {"": "cpu"}, force_hooks=True)
    elif offload == "disk":
        accelerate.disk_offload(m, str(tmp_path), cpu, offload_buffers=True)
    else:
        accelerate.cpu_offload(m, cpu, offload_buffers="buffers" in offload)
    assert torch.equal(m(X), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("make", [c.from_float for c in NEW])
def test_from_float_takes_no_stale_weight(make: Any) -> None:
    for attach in (nn.utils.weight_norm, parametrizations.weight_norm):
        with pytest.raises(ValueError, match=r"cannot be taken over, .*weight"):
            make(attach(nn.Linear(K, K)))


# --- what stays float, and the summary ---


class Own(nn.Linear):
    pass


def _of_two(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(TwoTensor(linear.weight.data, linear.weight.data))
    return linear


STAYS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Own(K, K), r"1 \(Own, a subclass of nn.Linear\)"),
    "float64": (lambda: nn.Linear(K, K).double(), r"1 \(its weight is torch.float64; int8 serves"),
    "float8": (
        lambda: nn.Linear(K, K).to(torch.float8_e4m3fn),
        r"1 \(its weight is torch.float8_e4m3fn; int8 serves float32, bfloat16 and float16\)",
    ),
    "tensor subclass": (lambda: _of_two(nn.Linear(K, K)), r"1 \(its weight is a TwoTensor, a ten"),
    "lazy": (lambda: nn.LazyLinear(K), r"1 \(LazyLinear: its weight has no shape yet, run the mod"),
    "attention": (
        lambda: nn.MultiheadAttention(K, 2),
        r"1.out_proj \(nn.MultiheadAttention reads its weight itself; torch.compile runs",
    ),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.Linear(K, K)),
        r"1 \(its weight is parametrized \(_WeightNorm\): torch.nn.utils.parametrize.remove_param",
    ),
}


class Beside(nn.Module):
    """A linear that is used, and beside it a module that is not."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(K, K))
        self.add_module("1", other)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("0")(x)


@BY_ALL
@pytest.mark.parametrize("row", STAYS)
def test_linears_that_nobody_left_out_stay_with_one_warning(row: str, how: str) -> None:
    make, phrase = STAYS[row]
    m, said = Beside(make()), how.split(",")[0]
    with pytest.warns(UserWarning, match=f"^qfx.{said}: 1 of 2 linears stay.*{phrase}") as caught:
        PREPARE[how](m)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert type(m.get_submodule("0")) in NEW
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PREPARE[how](Beside(make()), qfx.Config(skip=("1",)))
        PREPARE[how](Beside(make()), qfx.Config(only=("0",)))


def test_parametrizations_are_removed_as_the_message_says() -> None:
    linear = parametrizations.weight_norm(nn.Linear(K, K))
    m = nn.Sequential(linear)
    with pytest.raises(
        ValueError, match=r"no nn.Linear inside it; there is 0 \(its weight is para"
    ):
        qfx.quantize_(m)
    parametrize.remove_parametrizations(linear, "weight")
    assert sqnr(m(X), qfx.quantize_(m)(X).detach()) > 25


def test_lazy_linears_are_linears_once_they_ran() -> None:
    m = nn.Sequential(nn.LazyLinear(K))
    expected = m(X).detach()
    assert sqnr(expected, qfx.quantize_(m)(X).detach()) > 25


def test_the_summary_says_what_became_of_each_linear(caplog: pytest.LogCaptureFixture) -> None:
    m = nn.ModuleDict({name: nn.Linear(K, K) for name in "abcd"} | {"own": Own(K, K)})
    recipe = qfx.Recipe((qfx.SiteRecipe("c", 0, K, K, None, reason="too sensitive"),))
    with caplog.at_level(logging.INFO, "qfx"), pytest.warns(UserWarning, match="own"):
        qfx.quantize_(m, qfx.Config(skip=("a",), only=("a", "c", "d", "own"), recipe=recipe))
    lines = [line.split(None, 3) for line in caplog.text.splitlines()]
    assert ["a", "32x32", "float", "skip='a'"] in lines
    assert ["b", "32x32", "float", "not in only"] in lines
    assert ["c", "32x32", "float", "the recipe leaves it float: too sensitive"] in lines
    assert ["own", "32x32", "float", "Own, a subclass of nn.Linear"] in lines
    assert ["d", "32x32", "Linear", "xa8r_ws8r_h16"] in lines
    assert "1 of 5 linears replaced, the model: 0.02 MB -> 0.02 MB" in caplog.text


def test_a_recipe_means_a_shared_module_by_any_of_its_names() -> None:
    shared = nn.Linear(K, K)
    m = nn.ModuleDict({"b": shared, "a": shared, "c": nn.Linear(K, K)})
    recipe = qfx.Recipe((qfx.SiteRecipe("a", 0, K, K, None, reason="too sensitive"),))
    qfx.quantize_(m, qfx.Config(recipe=recipe))
    assert m["a"] is m["b"] is shared and type(m["c"]) is qfx.nn.Linear
