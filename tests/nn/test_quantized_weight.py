"""What a user does with the weight of a linear works on an int8 one: it is read as floats, writes
reach the codes, and linears of it run int8."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import fusion, parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import qfx
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.nn.weight_view import WeightView
from tests.lib.decoders import decoder
from tests.lib.models import compiled
from tests.lib.pairs import every
from tests.nn.test_nn_linear import BY_VARIED, made

D = 128
X = torch.randn(16, D, generator=torch.Generator().manual_seed(9))
CHANGE = 0.05 * torch.randn(D, D, generator=torch.Generator().manual_seed(8))


def float_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)).eval()


def model(seed: int = 0, scheme: Any = None) -> nn.Sequential:
    config = qfx.Config(scheme=scheme) if scheme else qfx.Config()
    return qfx.quantize_(float_model(seed), config)  # type: ignore[return-value]


def y(m: nn.Module) -> Tensor:
    with torch.no_grad():
        return m(X)  # type: ignore[no-any-return]


def near(a: Tensor, b: Tensor, db: float = 25) -> bool:
    return float(qfx.sqnr(b.detach().float(), a.detach().float())) > db


def weight(m: Any) -> Tensor:
    found: Tensor = m[0].weight.dequantize()
    return found


# --- writes: each changes the weight of the first linear as it would a float one ---

Write = Callable[[Any, Tensor], Any]
WRITES: dict[str, Write] = {
    "in place": lambda m, w: m[0].weight.add_(CHANGE),
    "data": lambda m, w: m[0].weight.data.add_(CHANGE),
    "data +=": lambda m, w: exec("m[0].weight.data += d", {"m": m, "d": CHANGE}),
    "data =": lambda m, w: setattr(m[0].weight, "data", w + CHANGE),
    "data.set_": lambda m, w: m[0].weight.data.set_(w + CHANGE),
    "foreach": lambda m, w: torch._foreach_add_([m[0].weight], [CHANGE]),
    "out": lambda m, w: torch.add(w, CHANGE, out=m[0].weight),
    "copy of the state": lambda m, w: m.state_dict()["0.codes"].copy_(
        qfx.nn.Linear.from_float(linear_of(w + CHANGE), m[0].scheme).codes
    ),
    "load": lambda m, w: m.load_state_dict({**float_state(m), "0.weight": w + CHANGE}),
    "load, assigned": lambda m, w: m.load_state_dict(
        {**float_state(m), "0.weight": w + CHANGE}, assign=True
    ),
    "a row and a column": lambda m, w: (
        m[0].weight[3].add_(CHANGE[3]),
        m[0].weight.t()[:, :3].add_(CHANGE.t()[:, :3]),
        m[0].weight.view(-1)[4 * D :].add_(CHANGE.reshape(-1)[4 * D :]),
    ),
    "places": lambda m, w: m[0].weight.__setitem__((slice(None), slice(0, D)), w + CHANGE),
    "swapped": lambda m, w: torch.utils.swap_tensors(m[0].weight, with_change(m)),
    "compiled": lambda m, w: compiled_copy(m[0].weight, w + CHANGE),
}


def linear_of(w: Tensor) -> nn.Linear:
    linear = nn.Linear(D, D)
    linear.weight.data = w
    return linear


def float_state(m: Any) -> dict[str, Tensor]:
    named = {"0.weight": weight(m), "2.weight": m[2].weight.dequantize()}
    return {**named, "0.bias": m[0].bias.detach(), "2.bias": m[2].bias.detach()}


def with_change(m: Any) -> nn.Parameter:
    return nn.Parameter(QuantizedWeight.of(weight(m) + CHANGE, m[0].scheme), requires_grad=False)


def compiled_copy(to: Tensor, value: Tensor) -> None:
    compiled(lambda: to.data.copy_(value))()


@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_is_there(how: str) -> None:
    m, other = model(), model()
    w = weight(m)
    with torch.no_grad():
        WRITES[how](m, w)
    if how == "copy of the state":  # of which the scales are those of before
        expected = qfx.nn.Linear.from_float(linear_of(w + CHANGE), m[0].scheme).codes
        assert torch.equal(m[0].codes, expected)
        return
    assert near(weight(m), w + CHANGE) and not torch.equal(y(m), y(other))
    assert type(m[0].weight) is QuantizedWeight and near(y(m), F.linear(
        F.gelu(F.linear(X, w + CHANGE, m[0].bias)), m[2].weight, m[2].bias))  # fmt: skip


def test_traces_are_made_while_gradients_are_enabled() -> None:
    """The graph is for inference, and says so if it is to give gradients."""
    m = model()
    traced = qfx.trace(m, X)
    assert torch.equal(traced(X).detach(), y(m))
    with pytest.raises(NotImplementedError, match="qfx::linear_dynamic is an inference operator"):
        traced(X.clone().requires_grad_()).sum().backward()


def test_aliases_stay_aliases_and_versions_move() -> None:
    m = model()
    alias, version = m[0].weight.detach(), m[0].weight._version
    twin = torch.fx.symbolic_trace(m)
    assert any(node.op == "call_module" for node in twin.graph.nodes)
    with torch.no_grad():
        m[0].weight.mul_(2)
    assert torch.equal(alias.dequantize(), weight(m)) and m[0].weight._version > version
    assert torch.equal(y(twin), y(m))
    m.load_state_dict(model(1).state_dict())
    assert torch.equal(y(twin), y(m)) and torch.equal(y(m), y(model(1)))


def test_the_state_dict_can_be_written_and_takes_no_floats_for_codes() -> None:
    m, new = model(), model(1).state_dict()
    for key, value in m.state_dict().items():
        value.copy_(new[key])
    assert torch.equal(y(m), y(model(1)))
    state = m.state_dict()
    with pytest.raises(TypeError, match="no floats to average"):
        state["0.codes"].copy_(0.5 * state["0.codes"] + 0.5 * new["0.codes"])
    with pytest.raises(TypeError, match="arithmetic on a state dict's part"):
        state["0.scale"].mul_(0.5).add_(new["0.scale"], alpha=0.5)
    with pytest.raises(ValueError, match="the scheme of a state dict was overwritten"):
        state["0.scheme"].zero_()
    state["2.codes"][3].zero_()
    assert not m[2].weight[3].any() and m[2].weight[4].any()


# --- many writes, and writes of what is there ---


def moved_average(p: Tensor, other: Tensor) -> None:
    p.mul_(0.99).add_(other, alpha=0.01)


def moved_towards(p: Tensor, other: Tensor) -> None:
    p.lerp_(other, 0.01)


def decayed(p: Tensor, other: Tensor) -> None:
    p.mul_(0.999)


@pytest.mark.parametrize(
    "step, dtype", every([moved_average, moved_towards, decayed], [torch.float32, torch.bfloat16])
)
def test_roundings_of_many_writes_do_not_add_up(step: Any, dtype: torch.dtype) -> None:
    """Each rounds at random by numbers of its own, and few of them can be taken back."""
    m, exact, other = model().to(dtype)[0], float_model()[0].weight.detach(), float_model(1)[0]
    first = exact.clone()
    with torch.no_grad():
        for _ in range(60):
            step(m.weight, other.weight.to(dtype))
            step(exact, other.weight)
    assert qfx.sqnr(exact, m.weight.dequantize().float()) > qfx.sqnr(exact, first) + 3
    assert len(m.weight.memory.earlier) <= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_own_values_change_nothing(dtype: torch.dtype) -> None:
    m: Any = model().to(dtype)
    codes, w = m[0].codes, m[0].weight
    with torch.no_grad():
        w.copy_(w + 0)
        w[:] = w + 0
        w[3].copy_((w + 0)[3])
        w.view(-1).copy_((w + 0).view(-1))
        w.data = w + 0
    averaged: Any = AveragedModel(m)
    for _ in range(5):
        averaged.update_parameters(m)
    for each in (m, averaged.module):
        assert torch.equal(each[0].codes, codes) and not each[0].weight.memory.earlier


def test_it_is_read_in_inference_mode() -> None:
    m = model()
    with torch.inference_mode():
        w = m[0].weight
        shown = [w.detach(), w.t(), w[:3], w.view(-1), m.state_dict()["0.codes"], m(X)]
    assert all(each.numel() for each in shown)
    with torch.no_grad():
        m[0].weight.mul_(2)
    m(X.clone().requires_grad_()).sum().backward()


def test_a_view_is_shared_copied_and_pickled() -> None:
    m = model()
    rows = m[0].weight.detach()[:3]
    assert rows.share_memory_().is_shared() and m[0].weight.is_shared()
    torch.save([rows, m[0].weight.t()], buffer := io.BytesIO())
    buffer.seek(0)
    kept = torch.load(buffer, weights_only=True)
    assert torch.equal(kept[0], weight(m)[:3]) and torch.equal(kept[1], weight(m).t())
    assert torch.equal(copy.deepcopy(rows).dequantize(), weight(m)[:3])
    assert repr(rows).startswith("WeightView(tensor([[")
    with pytest.raises(RuntimeError, match="no floats in memory"):
        rows.numpy()


# --- loading: whatever it is of, all of it or nothing ---


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("of", ["own", "own, another scheme", "float", "parameters"])
def test_loading(of: str, assign: bool) -> None:
    m, source = model(), model(1, "w8a8" if of == "own, another scheme" else None)
    state: Any = source.state_dict()
    if of == "float":
        state = float_model(1).state_dict()
    elif of == "parameters":
        state = dict(source.named_parameters())
    with torch.no_grad():
        m[0].weight.add_(CHANGE)
    m.load_state_dict(state, assign=assign)
    assert m[0].weight.memory.earlier == ()
    expected = y(source)
    assert torch.equal(y(m), expected) if of != "float" else near(y(m), y(float_model(1)))
    assert type(m[0].weight) is QuantizedWeight and m[0].weight.dtype == torch.float32


def test_a_float_state_is_quantized_as_the_model_was() -> None:
    """To the nearest, whatever the module held."""
    source = float_model(1)
    quantized = qfx.quantize_(float_model(1), qfx.Config(scheme=qfx.Scheme()))
    for held in (0, 1):
        m = model(held, qfx.Scheme())
        m.load_state_dict(source.state_dict())
        assert torch.equal(y(m), y(quantized))


def test_a_weight_beside_codes_is_unexpected() -> None:
    m, state = model(), {**model(1).state_dict(), "0.weight": torch.zeros(D, D)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"0\.weight"'):
        m.load_state_dict(state)


def test_what_is_computed_or_shared_is_loaded_with_a_word() -> None:
    m = model()
    own = m.state_dict()
    parametrizations.weight_norm(m[0])
    before = y(m)
    m.load_state_dict({name: t.clone() for name, t in m.state_dict().items()})
    assert near(y(m), before, 35)
    with pytest.raises(RuntimeError, match=r"0\.weight is computed before each call"):
        m.load_state_dict(own)
    shared = model().share_memory()
    with pytest.warns(UserWarning, match="that processes share: the others keep the former one"):
        shared.load_state_dict(model(1, qfx.Scheme()).state_dict())


def test_a_failed_load_takes_nothing() -> None:
    m = model()
    before = y(m)
    for broken in ({"2.bias": torch.zeros(3)}, {"2.codes": torch.zeros(2, 2, dtype=torch.int8)}):
        with pytest.raises(RuntimeError, match="nothing was loaded"):
            m.load_state_dict({**model(1).state_dict(), **broken})
    for broken in ({"0.weight": torch.ones(2, D)}, {"2.weight": torch.full((D, D), torch.nan)}):
        with pytest.raises(RuntimeError, match="nothing was loaded"):
            m.load_state_dict({**float_model(1).state_dict(), **broken})
    assert torch.equal(y(m), before)


# --- what takes a linear apart, or puts another weight into it ---


def test_functional_call_changes_nothing_for_good() -> None:
    m, other = model(), model(1)
    before = y(m)
    with torch.no_grad():
        swapped = torch.func.functional_call(m, dict(other.named_parameters()), (X,))
        floats = torch.func.functional_call(m, dict(float_model(1).named_parameters()), (X,))
    assert torch.equal(swapped, y(other)) and torch.equal(floats, y(float_model(1)))
    assert torch.equal(y(m), before)


def test_tied_weights_are_one() -> None:
    m = model()
    m[2].weight = m[0].weight
    with torch.no_grad():
        m[0].weight.mul_(2)
    assert torch.equal(m[2].weight.dequantize(), weight(m))
    for moved in (m.bfloat16(), m.to("meta"), m.to_empty(device="cpu"), copy.deepcopy(m)):
        assert moved[2].weight is moved[0].weight
    assert [*dict(m.named_parameters())] == ["0.weight", "0.bias", "2.bias"]


def test_linears_that_share_a_float_weight_share_its_codes() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    second.weight = first.weight
    m: Any = qfx.quantize_(nn.Sequential(first, second))
    assert m[0].weight is m[1].weight and m[0].bias is not m[1].bias
    llama: Any = decoder("llama", num_hidden_layers=1)
    mlp = llama.model.layers[0].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    qfx.quantize_(llama)
    assert mlp.up_proj.factor is not None  # smoothed, both by what they read
    assert mlp.up_proj.weight is mlp.gate_proj.weight


def test_a_float_weight_is_what_it_is_and_a_warning_says_so() -> None:
    m, w = model(), torch.randn(D, D)
    with pytest.warns(UserWarning, match="computes in float from now on"):
        m[0].weight = nn.Parameter(w)
    assert torch.equal(m[0](X), F.linear(X, w, m[0].bias)) and "scheme" not in repr(m[0])
    assert "0.weight" in m.state_dict() and "2.codes" in m.state_dict()
    m.load_state_dict(model(1).state_dict())  # of codes, so it is int8 again
    assert torch.equal(y(m), y(model(1))) and type(m[0].weight) is QuantizedWeight


def test_norms_pruning_and_folding() -> None:
    m = model()
    before, w = y(m), weight(m)
    parametrizations.weight_norm(m[0])
    assert near(y(m), before)
    m = model()
    prune.l1_unstructured(m[0], "weight", 0.5)
    assert near(m[0].weight, w * (w.abs() > w.abs().median())) and not torch.equal(y(m), before)
    m = model()
    parametrize.register_parametrization(m[0], "weight", nn.Tanh())
    assert near(y(m), m[2](F.gelu(F.linear(X, w.tanh(), m[0].bias))))
    m, norm = model(), nn.BatchNorm1d(D).eval()
    norm.running_mean, norm.running_var = torch.randn(D), torch.rand(D) + 0.5
    with pytest.warns(UserWarning, match="computes in float"):
        fused = fusion.fuse_linear_bn_eval(m[0], norm)
    assert near(fused(X), norm(m[0](X))) and torch.equal(y(m), before)


def test_transforms_of_torch_func() -> None:
    m, x = model(), X.clone().requires_grad_()

    def loss(given: Tensor) -> Tensor:
        return m(given).square().sum()  # type: ignore[no-any-return]

    (expected,) = torch.autograd.grad(loss(x), x)
    assert near(torch.func.grad(loss)(X), expected, 60)
    assert near(torch.func.vmap(torch.func.grad(loss))(X), expected, 60)
    with torch.no_grad():
        assert near(torch.func.vmap(m)(X), y(m), 60)
    _, tangent = torch.func.jvp(m, (X,), (torch.ones_like(X),))
    assert near(tangent, torch.func.jvp(float_model(), (X,), (torch.ones_like(X),))[1])


def test_averages_of_parameters_are_those_of_floats() -> None:
    averaged: Any = AveragedModel(model())
    for seed in (0, 1):
        averaged.update_parameters(model(seed))
    expected = float_model()
    with torch.no_grad():
        for p, other in zip(expected.parameters(), float_model(1).parameters(), strict=True):
            p.lerp_(other, 0.5)
    assert near(y(averaged.module), y(expected), 20)
    assert type(averaged.module[0].weight) is QuantizedWeight


# --- what it says of itself ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_has_the_type_of_the_float_weight(dtype: torch.dtype) -> None:
    m: Any = qfx.quantize_(float_model().to(dtype))
    assert m[0].weight.dtype == m[0].bias.dtype == dtype
    assert m[0].weight.shape == (D, D) and m[0].weight.numel() == D * D
    assert D * D < m[0].weight.nbytes < 1.1 * D * D and m[0].weight.element_size() == 1
    codes, reference = m[0].codes, m[0].weight
    with torch.no_grad():
        y_before = m(X.to(dtype)).float()
    m.to(torch.bfloat16)
    assert m[0].weight is reference and m[0].weight.dtype == torch.bfloat16
    assert torch.equal(m[0].codes, codes) and near(y(m.float()), y_before, 30)


def test_it_has_no_floats_to_point_to() -> None:
    m = model()
    assert m[0].weight.data_ptr() == m[0].packed.data_ptr()
    with pytest.raises(RuntimeError, match=r"no floats in memory: weight\.dequantize"):
        m[0].weight.numpy()
    for call in (lambda w: torch.ops.qfx.unpack_weight(w, [D, 8, 0, 0, 0], D), torch.from_dlpack):
        with pytest.raises((RuntimeError, TypeError, ValueError, BufferError)):
            call(m[0].weight)
    with pytest.warns(UserWarning, match="codes and does not train"):
        m[0].weight.requires_grad = True
    assert not m[0].weight.requires_grad


@BY_VARIED
def test_every_scheme_runs_int8_by_the_functions_of_torch(row: str) -> None:
    """The bits of the module, by F.linear, in a graph of autograd and without."""
    module = made(row)
    k = module.in_features
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(3))
    expected = module(x)
    assert torch.equal(F.linear(x, module.weight, module.bias), expected)
    with torch.no_grad():
        assert torch.equal(F.linear(x, module.weight, module.bias), expected)
        if module.shift is None:
            assert torch.equal(x @ module.weight.t(), F.linear(x, module.weight))
    if module.scheme.calibrated:  # a static scale clips, of which F.linear's gradient knows nothing
        return
    x.requires_grad_()
    grads = [
        torch.autograd.grad(f(x).square().sum(), x)[0]
        for f in (module, lambda x: F.linear(x, module.weight, module.bias))
    ]
    assert near(grads[1], grads[0], 40)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "some tokens of one text": lambda: torch.randn(1, 9, D)[:, :7],
    "some tokens of each text": lambda: torch.randn(3, 9, D)[:, ::2],
    "texts in the second dimension": lambda: torch.randn(9, 3, D).transpose(0, 1),
    "heads": lambda: torch.randn(2, 5, 3, D).transpose(1, 2),
    "features in front": lambda: torch.randn(3, D, 5).mT,
    "every other feature": lambda: torch.randn(5, 2 * D)[:, ::2],
    "a vector": lambda: torch.randn(D),
    "no text": lambda: torch.randn(0, 3, D),
}


@pytest.mark.parametrize("how, bias", every(INPUTS, [True, False]))
def test_inputs_that_are_not_contiguous_run_int8_too(how: str, bias: bool) -> None:
    """PyTorch multiplies them batch by batch."""
    torch.manual_seed(0)
    module, x = qfx.nn.Linear(D, D, bias=bias), INPUTS[how]()
    with torch.no_grad():
        assert torch.equal(F.linear(x, module.weight, module.bias), module(x))
        assert torch.equal(x @ module.weight.t(), F.linear(x, module.weight))
    y = F.linear(x.requires_grad_(), module.weight, module.bias)
    assert torch.equal(y, module(x)) and y.requires_grad


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_rows_are_int8_weights_of_their_own(scheme: str) -> None:
    m = model(scheme=scheme)
    rows = m[0].weight[32:96].clone()
    assert type(rows) is QuantizedWeight and torch.equal(rows.dequantize(), weight(m)[32:96])
    assert type(m[0].weight[32:96]) is WeightView and type(m[0].weight[::2].clone()) is Tensor
    columns = m[0].weight[:, 64:].clone()
    assert torch.equal(torch.as_tensor(columns.dequantize()), weight(m)[:, 64:])


def test_pickles_hold_codes_alone() -> None:
    m = model()
    torch.save(m[0].weight, buffer := io.BytesIO())
    assert len(buffer.getvalue()) < 1.2 * D * D + 4000
    buffer.seek(0)
    kept = torch.load(buffer, weights_only=True)
    assert isinstance(kept, nn.Parameter) and torch.equal(kept.dequantize(), weight(m))
    again = pickle.loads(pickle.dumps(m[0].weight.detach()))
    assert not isinstance(again, nn.Parameter) and torch.equal(again.dequantize(), weight(m))
