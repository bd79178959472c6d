"""qfx.nn.Linear and quantize_: every scheme gives the bits of its operators, survives every way a
module is kept, and passes gradients to its input."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import qfx
from qfx.ops import REFERENCES, registry
from qfx.ops.code import code_of
from qfx.ops.rotation import transformed_weight
from qfx.ops.single_tensors import sqnr
from tests.lib.pairs import covering, every, properties
from tests.lib.strategies import POSITIVE, SEEDS, SIZES

ops = torch.ops.qfx
HALF_ULP = 2.0**-24
K, N = 192, 40
P4, P5 = (qfx.QSpec(bits=bits, group=64, packed=True) for bits in (4, 5))
Q, ROW, TENSOR, COLUMN = qfx.QSpec, qfx.PER_ROW, qfx.PER_TENSOR, qfx.PER_COLUMN
STATIC, STATIC_A = Q(axes=TENSOR, static=True), Q(symmetric=False, axes=TENSOR, static=True)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 7, K, generator=GENERATOR)


def _site(scheme: qfx.Scheme, name: str = "0", **other: Any) -> qfx.SiteRecipe:
    return qfx.SiteRecipe(name, 0, N, K, scheme, **other)


FACTOR = tuple((0.5 + torch.rand(K, generator=GENERATOR)).tolist())
SCHEMES: dict[str, qfx.Scheme | qfx.SiteRecipe] = {
    str(s): s
    for s in (
        qfx.Scheme(),
        qfx.Scheme(x=Q(symmetric=False)),
        qfx.Scheme(x=Q(axes=TENSOR), w=Q(axes=TENSOR)),
        qfx.Scheme(x=Q(symmetric=False, axes=TENSOR)),
        qfx.Scheme(x=Q(bits=4, symmetric=False), w=Q(bits=2)),
        qfx.Scheme(backward="int8"),
        qfx.Scheme(rotation=64),
        qfx.Scheme(x=Q(symmetric=False), w=Q(bits=4), rotation=16),
        qfx.Scheme(w=Q(axes=COLUMN)),
        qfx.Scheme(w=Q(axes=COLUMN), rotation=64),
        qfx.Scheme(w=Q(bits=4, group=64)),
        qfx.Scheme(w=Q(bits=4, symmetric=False, group=128)),
        qfx.Scheme(w=Q(symmetric=False), rotation=64),
        qfx.Scheme(x=Q(group=32)),
        qfx.Scheme(x=Q(group=64), w=Q(group=64), rotation=64),
        qfx.Scheme(x=Q(symmetric=False, group=96), w=Q(symmetric=False)),
        qfx.Scheme(x=None),
        qfx.Scheme(x=None, w=Q(bits=4), rotation=64),
        qfx.Scheme(w=replace(P4, symmetric=False), rotation=64),
        qfx.Scheme(x=Q(symmetric=False), w=replace(P5, group=32)),
        qfx.Scheme(x=Q(group=128), w=replace(P4, group=128), rotation=16),
        qfx.Scheme(x=None, w=replace(P5, symmetric=False, group=128)),
        qfx.Scheme(x=None, w=P4, rotation=64),
    )
} | {
    "static": _site(qfx.Scheme(x=STATIC), scale=0.02),
    "static with zero point": _site(qfx.Scheme(x=STATIC_A), scale=0.02, zero_point=7),
    "factor": _site(qfx.Scheme(), factor=FACTOR),
    "static, factor, rotation": _site(
        qfx.Scheme(x=STATIC, rotation=64), factor=FACTOR, scale=0.02
    ),
    "static, groups": _site(qfx.Scheme(x=STATIC_A, w=Q(bits=4, group=64)), scale=0.02),
    "static, packed": _site(qfx.Scheme(x=STATIC_A, w=P5, rotation=64), factor=FACTOR, scale=0.02),
}  # fmt: skip
BY_ROWS = pytest.mark.parametrize("row", SCHEMES)


def scheme_of(row: str) -> qfx.Scheme:
    how = SCHEMES[row]
    found = how.scheme if isinstance(how, qfx.SiteRecipe) else how
    assert found is not None
    return found


def _properties(row: str) -> list[Hashable]:
    """Each field of its scheme, and what a recipe adds."""
    how = SCHEMES[row]
    added = isinstance(how, qfx.SiteRecipe) and (how.factor is not None, how.zero_point)
    return [*properties(scheme_of(row)), added]


# Schemes that have, between them, every property of any.
VARIED = covering([*SCHEMES], _properties)
BY_VARIED = pytest.mark.parametrize("row", VARIED)


def float_linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, bias)


def made(row: str, bias: bool = True) -> qfx.nn.Linear:
    return qfx.nn.Linear.from_float(float_linear(bias), SCHEMES[row])


def outputs(module: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return module(x)


def x_values(module: qfx.nn.Linear) -> Tensor:
    """x'^ of X, by the references, in float64."""
    scheme, k = module.scheme, module.in_features
    turned = REFERENCES["rotate"](X, module.factor, scheme.block(k))
    if scheme.x is None:
        return turned.double()
    static = (module.x_scale, module.x_zero_point)
    q, *each = REFERENCES["quantize"](turned, code_of(scheme.x), *static)
    scale, zero = (v.repeat_interleave(scheme.x.group or k, -1)[..., :k] for v in each)
    return (q.double() - zero) * scale.double()


def w_values(module: qfx.nn.Linear) -> Tensor:
    """w'^, in float64. (Q5) (Q14)"""
    codes, *each = module.quantized.unpacked
    group = module.scheme.w.group or K
    scale, zero, minimum = (
        0 if v is None else v.reshape(N, -1).double().repeat_interleave(group, 1)[:, :K]
        for v in each
    )
    return (codes.double() - zero) * scale + minimum


@pytest.mark.parametrize("row, bias", every(SCHEMES, [True, False]))
def test_output_is_the_product_of_the_values(row: str, bias: bool) -> None:
    """x'^ w'^T + b: exact but for the float32 roundings of (E1), (E3) or (W1), and of scales."""
    module = made(row, bias)
    x, w = x_values(module), w_values(module)
    exact = x @ w.t() + (0 if module.bias is None else module.bias.double())
    size = x.abs() @ w.abs().t() + (0 if module.bias is None else module.bias.double().abs())
    got = outputs(module)
    assert got.shape == (3, 7, N) and got.dtype == torch.float32
    assert ((got.double() - exact).abs() <= (K / 2 + 16) * HALF_ULP * size).all()


@BY_ROWS
def test_weight_is_within_a_step(row: str) -> None:
    """w'^ against w' = R (w / factor): half a step of its row, group or tensor, and what rounding
    packed scales to bfloat16 moves the ends of the range."""
    module, scheme = made(row), scheme_of(row)
    wanted = transformed_weight(float_linear().weight.detach(), module.factor, scheme.block(K))
    group, moved = scheme.w.group or K, 2.0**-9 * scheme.w.packed
    step = (
        module.quantized.unpacked.scale.reshape(N, -1).repeat_interleave(group, 1)[:, :K].double()
    )
    error = (w_values(module) - wanted.double()).abs()
    assert (error <= step * (0.5 + 255 * 2.0**-20 + moved * 2**scheme.w.bits)).all()
    assert module.codes.dtype == torch.int8 and module.codes.shape == (N, K)


@BY_VARIED
def test_recording_gradients_changes_no_bit(row: str) -> None:
    module = made(row)
    assert torch.equal(module(X.clone().requires_grad_()), outputs(module))
    assert torch.equal(module(X), outputs(module))  # for the bias alone


@pytest.mark.parametrize("row", [row for row in SCHEMES if not row.endswith("_g8")])
def test_gradients_reach_input_and_bias(row: str) -> None:
    """(T1), (T2): dx = factor R^T (G w'^), masked where a static range clips; G is kept."""
    module, scheme = made(row), scheme_of(row)
    x = X.clone().requires_grad_()
    y = module(x)
    grad = torch.randn(N, 7, 3, generator=torch.Generator().manual_seed(1)).permute(2, 1, 0)
    before = grad.clone()
    y.backward(grad)
    assert torch.equal(grad, before) and x.grad is not None
    assert module.bias is not None and module.bias.grad is not None
    w = w_values(module)
    back = {"factor": module.factor, "rotation": scheme.block(K), "back": True}
    through, size = grad.double() @ w, grad.double().abs() @ w.abs()
    if module.x_scale is not None:
        turned = ops.rotate(X, module.factor, scheme.block(K)) / module.x_scale.double()
        zero = 0 if module.x_zero_point is None else module.x_zero_point
        qmin = -127 if scheme.x is not None and scheme.x.symmetric else -128
        inside = (turned + zero >= qmin) & (turned + zero <= 127)
        assert 0.001 < (~inside).float().mean() < 0.2
        through, size = through * inside, size * inside
    expected = _back(through, **back)
    block = module.scheme.rotation
    spread = (
        size if not block else size.unflatten(-1, (-1, block)).sum(-1).repeat_interleave(block, -1)
    )
    bound = (N + 16) * HALF_ULP * spread * (1 if module.factor is None else module.factor)
    assert ((x.grad.double() - expected).abs() <= bound).all()
    assert torch.allclose(module.bias.grad, grad.sum((0, 1)), rtol=1e-5, atol=1e-5)


def _back(v: Tensor, factor: Tensor | None, rotation: int, back: bool) -> Tensor:
    """factor * (R^T v) in float64: R by its rows."""
    if rotation:
        r = ops.rotate(torch.eye(rotation), None, rotation).t().double()
        v = (v.unflatten(-1, (-1, rotation)) @ r).flatten(-2)
    return v if factor is None else v * factor


def test_int8_backward_is_reproducible() -> None:
    module, found = made("xs8r_ws8r_g8"), []
    for _ in range(2):
        torch.manual_seed(5)
        x = X.clone().requires_grad_()
        module(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0], found[1])
    exact = torch.ones(3, 7, N) @ module.weight
    assert 20 < sqnr(exact, found[0]) < 60  # rounded, and not much


# --- every way a module is kept ---


def _by_torch(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def _by_safetensors(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    save_file(state, folder / "state.safetensors")
    return load_file(folder / "state.safetensors")


@BY_VARIED
def test_the_numbers_of_the_weight_are_those_that_are_saved(row: str) -> None:
    """Made of the packed weight, beside which nothing holds them."""
    module = made(row)
    state, held = module.state_dict(), module.quantized.frozen._asdict()
    assert torch.equal(module.scale, state["scale"].float())
    zero = state.get("zero_point")
    assert (module.zero_point is None) == (zero is None) == scheme_of(row).w.symmetric
    assert module.zero_point is None or torch.equal(module.zero_point, zero)  # type: ignore
    assert "packed" in held and not {"codes", "scale", "zero_point", "minimum"} & {*held}
    assert not dict(module.named_buffers()) and "weight" in dict(module.named_parameters())


KEPT = list(product([_by_torch, _by_safetensors], [False, True]))


@pytest.mark.parametrize("row, kept", every(VARIED, KEPT))
def test_state_dict_round_trip(row: str, kept: tuple[Any, bool], tmp_path: Path) -> None:
    """Of a model made with another weight: codes and scales, nothing that depends on the build."""
    first = nn.Sequential(made(row))
    torch.manual_seed(1)
    second = nn.Sequential(qfx.nn.Linear.from_float(nn.Linear(K, N), SCHEMES[row]))
    keep, assign = kept
    state = keep(first.state_dict(), tmp_path)
    assert "0.codes" in state and not any("packed" in key for key in state)
    assert not torch.equal(outputs(first), outputs(second))
    second.load_state_dict(state, assign=assign)
    assert torch.equal(outputs(first), outputs(second))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "to cpu": lambda m: copy.deepcopy(m).to("cpu"),
    "through float16": lambda m: _same_bias(copy.deepcopy(m).half().float(), m),
    "compiled in place": lambda m: pickle.loads(pickle.dumps(_compiled(m))),
    "torch.save": lambda m: torch.load(_saved(m), weights_only=False),
}


def _compiled(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    other.compile(backend="eager")
    return copy.deepcopy(other)


def _same_bias(copied: nn.Module, original: nn.Module) -> nn.Module:
    copied.bias.data = original.bias.data  # type: ignore[union-attr]
    return copied


def _saved(module: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("row, name", every(SCHEMES, COPIES))
def test_copies_give_the_same_bits(row: str, name: str) -> None:
    module = made(row)
    other = COPIES[name](module)
    assert torch.equal(outputs(other), outputs(module))
    assert other.packed.data_ptr() != module.packed.data_ptr()


@pytest.mark.parametrize("row, dtype", every(VARIED, [torch.bfloat16, torch.float16]))
def test_half_types(row: str, dtype: torch.dtype) -> None:
    """The scales stay float32; the output is one rounding away from that of float32."""
    module = made(row, bias=False)
    wanted = outputs(module, X.to(dtype).float())
    half = copy.deepcopy(module).to(dtype)
    got = outputs(half, X.to(dtype))
    assert got.dtype == dtype and half.quantized.unpacked.scale.dtype == torch.float32
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    size = float(wanted.abs().max())
    coarse = 6 if scheme_of(row).x is None and scheme_of(row).rotation else 1  # x' is rounded too
    bound = unit * (wanted.abs() + (coarse - 1) * size) + torch.finfo(dtype).smallest_normal * unit
    assert ((got.float() - wanted).abs() <= bound).all()
    x = X.to(dtype).requires_grad_()
    half(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype and x.grad.isfinite().all()


@BY_VARIED
def test_made_on_meta_and_loaded(row: str) -> None:
    """How large models are made: shapes first, then the very tensors of the file."""
    first = made(row)
    with torch.device("meta"):
        linear = nn.Linear(K, N)
        second = qfx.nn.Linear.from_float(linear, SCHEMES[row])
        assert second(torch.empty(5, K)).shape == (5, N)
    assert held(second.to("meta")) == held(first)
    second.load_state_dict(first.state_dict(), assign=True)
    assert second.packed.device.type == "cpu"
    assert torch.equal(outputs(second), outputs(first))


@BY_VARIED
def test_exported_with_any_number_of_rows(row: str) -> None:
    module, example = made(row), (X.flatten(0, 1),)
    rows = ({0: torch.export.Dim("rows")},)
    with torch.no_grad():
        program = torch.export.export(nn.Sequential(module), example, dynamic_shapes=rows)
    assert torch.equal(outputs(program.module(), X[0]), outputs(module, X[0]))


def test_bias_comes_from_the_float_linear() -> None:
    linear = float_linear()
    module = qfx.nn.Linear.from_float(linear)
    assert module.bias is linear.bias and [*dict(module.named_parameters())] == ["weight", "bias"]
    assert "in_features=192, out_features=40, bias=True, scheme=xs8r_ws8r" in repr(module)


ANY = ("xs8r_ws8r", "ws8r", "xs8r_ws4g64", "xs8r_wa4p64_h64", "wa5p128")


@given(SIZES, POSITIVE, POSITIVE, SEEDS, st.sampled_from(ANY))
def test_any_shape(m: int, k: int, n: int, seed: int, row: str) -> None:
    """Edges of tiles, no rows, one feature."""
    g = torch.Generator().manual_seed(seed)
    linear, x = nn.Linear(k, n), torch.randn(m, 1, k, generator=g)
    linear.weight.data = torch.randn(n, k, generator=g)
    module = qfx.nn.Linear.from_float(linear, scheme_of(row))
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    assert y.shape == (m, 1, n) and torch.equal(y, outputs(module, x))
    y.sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == x.shape
    other = qfx.nn.Linear(k, n, scheme=scheme_of(row))
    other.load_state_dict(module.state_dict())
    assert torch.equal(outputs(other, x), outputs(module, x))


# --- compiled ---


@pytest.mark.parametrize("row, backend", every(VARIED, ["aot_eager", "qfx"]))
def test_compiled_equals_eager(row: str, backend: str) -> None:
    options: Any = {"inner": "aot_eager"} if backend == "qfx" else None
    module = made(row)
    compiled = torch.compile(module, backend=backend, fullgraph=True, options=options)
    assert torch.equal(outputs(compiled), outputs(module))
    if scheme_of(row).backward == "int8":
        return
    found = []
    for f in (module, compiled):
        x = X.clone().requires_grad_()
        y = f(x)
        y.square().sum().backward()
        found.append((y, x.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)


def test_inductor_compiles_it() -> None:
    """One graph of three schemes, trained and served."""
    rows = ("xs8r_ws8r_h64", "xs8r_ws4g64", "static")
    model = nn.ModuleList(made(row) for row in rows)

    def run(x: Tensor) -> Tensor:
        return torch.stack([module(x) for module in model]).relu()

    compiled = torch.compile(run, fullgraph=True)
    assert torch.equal(compiled(X), run(X))
    x, x2 = X.clone().requires_grad_(), X.clone().requires_grad_()
    compiled(x).sum().backward()
    run(x2).sum().backward()
    assert x.grad is not None and x2.grad is not None
    assert torch.allclose(x.grad, x2.grad, rtol=1e-4, atol=1e-4)


# --- quantize_ ---


def test_distributed_checkpoints_know_the_codes() -> None:
    first, second = qfx.quantize_(_model()), qfx.quantize_(_model().apply(_negated))
    assert not torch.equal(outputs(first), outputs(second))
    set_model_state_dict(second, get_model_state_dict(first))
    assert torch.equal(outputs(first), outputs(second))


def _negated(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.detach().neg_()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, 256), nn.GELU(), nn.Linear(256, N, bias=False))


def held(model: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_falls(dtype: torch.dtype) -> None:
    """To a byte an element of the weight, and 8 an output feature (scale and column sum)."""
    model = _model().to(dtype)
    weights, biases = K * 256 + 256 * N, 256 * dtype.itemsize
    assert held(model) == weights * dtype.itemsize + biases
    references = [torch.multiprocessing.reductions.StorageWeakRef(m.weight.untyped_storage())
                  for m in (model[0], model[2])]  # fmt: skip
    assert qfx.quantize_(model) is model
    padded_n = 256 + 64  # N is padded to 32
    assert held(model) <= K * 256 + 256 * 64 + biases + 8 * padded_n + 2 * 128
    assert all(reference.expired() for reference in references)
    assert outputs(model, X.to(dtype)).dtype == dtype
    assert sum(p.numel() * p.element_size() for p in model.parameters()) < 1.1 * held(model)


def test_model_is_close_to_float() -> None:
    model = _model()
    expected = outputs(model)
    assert sqnr(expected, outputs(qfx.quantize_(model))) > 30


@pytest.mark.parametrize("option", [{"skip": ("2",)}, {"only": ("0",)}])
def test_patterns(option: Any) -> None:
    model = qfx.quantize_(_model(), qfx.Config(**option))
    assert type(model[0]) is qfx.nn.Linear and type(model[2]) is nn.Linear


def test_a_module_with_two_names_stays_one() -> None:
    linear = nn.Linear(K, K)
    model = nn.ModuleDict({"a": linear, "b": linear})
    qfx.quantize_(model)
    assert model["a"] is model["b"] and type(model["a"]) is qfx.nn.Linear


def test_float64_and_subclasses_stay() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8).double(), Own(8, 8), nn.Linear(8, 8))
    qfx.quantize_(model)
    assert [type(m) for m in model] == [nn.Linear, Own, qfx.nn.Linear]


@pytest.mark.parametrize("prepare", [qfx.quantize_, qfx.prepare_qat])
def test_encoders_of_torch_do_not_read_past_the_modules(prepare: Any) -> None:
    """Their fast path takes the weights of linear1 and linear2 itself, and would run in float."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = [outputs(model, x), model(x, src_key_padding_mask=mask).detach()]
    prepare(model, config=qfx.Config(scheme=qfx.Scheme()))
    calls = []
    for module in model.modules():
        if isinstance(module, qfx.nn.Linear | qfx.nn.LSQLinear):  # a hook would leave the fast path
            forward = module.forward
            module.forward = lambda x, run=forward: (calls.append(1), run(x))[1]
    with torch.no_grad():
        got = [model(x), model(x, src_key_padding_mask=mask)]
    assert len(calls) == 8
    assert sqnr(expected[0], got[0]) > 25
    kept = ~mask[..., None]
    assert sqnr(expected[1] * kept, got[1] * kept) > 25


def test_a_recipe_decides() -> None:
    sites = (
        _site(qfx.Scheme(x=STATIC), "a", scale=0.02),
        qfx.SiteRecipe("b", 0, N, K, None, reason="too sensitive"),
    )
    model = nn.ModuleDict({name: float_linear() for name in "abc"})
    qfx.quantize_(model, qfx.Config(recipe=qfx.Recipe(sites), scheme=qfx.Scheme(rotation=64)))
    assert type(model["b"]) is nn.Linear
    assert str(model["a"].scheme) == "xs8T_ws8r" and str(model["c"].scheme) == "xs8r_ws8r_h64"
    assert torch.equal(outputs(model["a"]), outputs(made("static")))


TWICE = qfx.Recipe(
    (
        qfx.SiteRecipe("0", 0, N, K, qfx.Scheme(x=STATIC), scale=0.02),
        qfx.SiteRecipe("0", 1, N, K, qfx.Scheme(x=STATIC), scale=0.03),
    )
)
ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no linear": (lambda: qfx.quantize_(float_linear()), "quantize_: the model has no nn.Linear"),
    "pattern": (
        lambda: qfx.quantize_(_model(), qfx.Config(skip=("7",))),
        "'7' matches nothing; there is: 0, 2",
    ),
    "static without a recipe": (
        lambda: qfx.nn.Linear.from_float(float_linear(), qfx.Scheme(x=STATIC)),
        "xs8T_ws8r has static scales: give the SiteRecipe",
    ),
    "a recipe of another shape": (
        lambda: qfx.nn.Linear.from_float(nn.Linear(K, 41), SCHEMES["static"]),
        "the recipe of 0 is for N=40 K=192, the weight has N=41 K=192",
    ),
    "a recipe that says float": (
        lambda: qfx.nn.Linear.from_float(
            float_linear(), qfx.SiteRecipe("0", 0, N, K, None, reason="")
        ),
        "the recipe of 0 says that it stays float",
    ),
    "a recipe with outliers": (
        lambda: qfx.nn.Linear.from_float(float_linear(), _site(qfx.Scheme(), outliers=(1, 2))),
        "the recipe of 0 keeps 2 features in float, which a module does not",
    ),
    "two decisions": (
        lambda: qfx.quantize_(nn.Sequential(float_linear()), qfx.Config(recipe=TWICE)),
        "decides differently on the 2 calls of 0",
    ),
    "lsq with groups": (
        lambda: qfx.nn.LSQLinear(K, N, scheme=qfx.Scheme(w=Q(bits=4, group=64))),
        "LSQLinear: the scheme xs8r_ws4g64 is for graphs",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, phrase = ERRORS[name]
    with pytest.raises(ValueError, match=phrase):
        call()


def test_there_is_no_second_derivative() -> None:
    for row in ("xs8r_ws8r", "ws8r"):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(made(row)(x).square().sum(), x, create_graph=row == "ws8r")
        if row == "ws8r":
            with pytest.raises(NotImplementedError, match="Linear has no second derivative"):
                g.sum().backward()


def test_a_pickled_module_says_its_scheme_and_nothing_of_this_build() -> None:
    """Codes, and the scheme by itself; those of earlier builds, under their name, are read too."""
    module = qfx.nn.Linear.from_float(nn.Linear(65, 8), qfx.Scheme(w=qfx.QSpec(bits=4, group=64)))
    assert b"Prepared" not in pickle.dumps(module)
    state = dict(module.__getstate__())
    own = {"bias": state["_parameters"]["bias"]}
    state |= {"scheme": module.scheme, "_parameters": own}
    numbers = {"codes": module.codes, "scale": module.scale}
    of_0_2 = {"packed" if name == "codes" else name: t for name, t in numbers.items()}
    for buffers in (numbers, of_0_2):
        kept = state | {"_buffers": {**buffers, "factor": None}}
        again = qfx.nn.Linear.__new__(qfx.nn.Linear)
        again.__setstate__(kept)
        assert again.scheme == module.scheme and "scheme" in kept  # which may be used again
        assert torch.equal(again(torch.ones(2, 65)), module(torch.ones(2, 65)))


def test_nothing_is_done_for_autograd_where_it_records_nothing(monkeypatch: Any) -> None:
    module = qfx.nn.Linear.from_float(nn.Linear(K, N), qfx.Scheme())
    expected = module(X).detach()

    def called(*_: Any) -> None:
        raise AssertionError("autograd's kernel of an operator ran")

    monkeypatch.setattr(registry, "redispatch_below", called)
    with torch.no_grad():
        assert torch.equal(module(X), expected)
    module.requires_grad_(False)
    assert torch.equal(module(X), expected)
    with (
        forward_ad.dual_level(),
        torch.no_grad(),
        pytest.raises(NotImplementedError, match="tangent"),
    ):
        module(forward_ad.make_dual(X, X))
