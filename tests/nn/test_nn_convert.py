"""convert: what was trained is served with the same bits, from codes that are packed once."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qfx
from qfx.nn import BinaryLinear, Linear, LSQLinear, SignLinear
from qfx.ops.binary import binary_pack, cuda_binary_pack, cuda_octets_of, octets_of, packed_octets
from tests.conftest import same_bits
from tests.lib.pairs import LONG, every
from tests.lib.strategies import POSITIVE, SEEDS

K, N = 24, 16
X = torch.randn(5, K, generator=torch.Generator().manual_seed(0))
TENSOR = qfx.QSpec(axes=qfx.PER_TENSOR)
SCHEMES = {
    "rows": qfx.Scheme(),
    "rows, 2 bits": qfx.Scheme(w=qfx.QSpec(2)),
    "zero points": qfx.Scheme(x=qfx.QSpec(symmetric=False)),
    "learned": qfx.Scheme(x=TENSOR, w=TENSOR),
    "learned, 4 bits": qfx.Scheme(x=qfx.QSpec(4, axes=qfx.PER_TENSOR), w=qfx.QSpec(4)),
    "learned, 5 bits with a zero": qfx.Scheme(x=qfx.QSpec(5, False, qfx.PER_TENSOR)),
    "learned, int8 backward": qfx.Scheme(x=TENSOR, backward="int8"),
}
BINARY = {"1 bit": qfx.PER_ROW, "1 bit, one scale": qfx.PER_TENSOR}
ROWS = [f"{name}{end}" for name in (*SCHEMES, *BINARY) for end in ("", ", shift")]
BY_ROWS = pytest.mark.parametrize("row", ROWS)
# One of each, every other one with a shift.
FEW = ROWS if LONG else [row for i, row in enumerate(ROWS) if i % 4 in (0, 3)]
BY_FEW = pytest.mark.parametrize("row", FEW)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def trained(row: str) -> Any:
    """One module, whose weight, bias, steps and shift training has moved."""
    torch.manual_seed(0)
    name = row.removesuffix(", shift")
    shift, linear = name != row, nn.Linear(K, N)
    module: Any
    if name in BINARY:
        module = BinaryLinear.from_float(linear, BINARY[name], shift)
    else:
        module = LSQLinear.from_float(linear, SCHEMES[name], shift)
    module.observe(X)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(3):
        module(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.eval()


def both(row: str) -> tuple[Any, Any]:
    """A trained module and what it becomes."""
    module = trained(row)
    model = qfx.convert(nn.Sequential(copy.deepcopy(module)))
    return module, model[0]


@pytest.mark.parametrize("row, dtype", every(ROWS, DTYPES))
def test_the_bits_of_the_eval_mode(row: str, dtype: torch.dtype) -> None:
    x = X.to(dtype)
    module, served = both(row)
    assert same_bits(module(x).detach(), served(x).detach())
    expected = module.to(dtype)(x).detach()
    assert same_bits(qfx.convert(nn.Sequential(module))(x).detach(), expected)


@BY_FEW
def test_the_bits_of_rows_that_are_empty_many_or_not_finite(row: str) -> None:
    odd = torch.cat([X, 1e4 * X, 0 * X])
    odd[1, 2], odd[2, 3] = torch.nan, -torch.inf
    module, served = both(row)
    for x in (odd, X[:0], X[0], X.reshape(5, 1, K), X.t().contiguous().t()):
        assert same_bits(module(x).detach(), served(x).detach())
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert same_bits(module(x), served(x)) and served(x).dtype == torch.bfloat16


@BY_ROWS
def test_gradients_of_x_and_the_bias(row: str) -> None:
    """To the bit, unless they are stochastic; of 1 bit, where scales are multiplied in another
    order, within N + 4 roundings of the sum of sizes."""
    found = []
    module, served = both(row)
    for m in (module, served):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        m(x).square().sum().backward()
        found.append((x.grad, m.bias.grad))
    (dx, db), (dx2, db2) = found
    assert torch.equal(db, db2)
    if isinstance(module, BinaryLinear):
        sizes = (2 * module(X)).detach().abs() @ served.weight.abs()
        assert ((dx - dx2).abs() <= (N + 4) * 2.0**-23 * sizes).all() and dx.any()
    else:
        assert torch.equal(dx, dx2)


@BY_FEW
def test_no_float_weight_and_no_step_is_kept(row: str) -> None:
    module = trained(row)
    bias, model = module.bias, nn.Sequential(module)
    served: Any = qfx.convert(model)[0]
    assert served.bias is bias and [p for p in served.parameters() if p.requires_grad] == [bias]
    held = getattr(getattr(served, "quantized", None), "frozen", None) or served.buffers()
    floats = {i: t.numel() for i, t in enumerate(held) if t is not None and t.is_floating_point()}
    assert sum(floats.values()) <= N + 1 + K
    frozen = nn.Sequential(trained(row))
    bias = frozen[0].bias.requires_grad_(False)
    assert qfx.convert(frozen)[0].bias is bias and not frozen(X).requires_grad


@BY_FEW
def test_round_trips_of_the_state(row: str, tmp_path: Path) -> None:
    _, served = both(row)
    model = nn.Sequential(served)
    expected = model(X).detach()
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    states = [
        load_file(tmp_path / "state.safetensors"),
        torch.load(tmp_path / "state.pt", weights_only=True),
    ]
    for state in states:
        for assign in (False, True):
            other = nn.Sequential(type(served)(K, N))
            other.load_state_dict(state, assign=assign)
            assert same_bits(other(X).detach(), expected)
            assert all(same_bits(other.state_dict()[n], state[n]) for n in state)
        other = nn.Sequential(type(served)(K, N)).to("meta")
        other.load_state_dict(state, assign=True)
        assert same_bits(other(X).detach(), expected)
        plain = "rows" if isinstance(served, Linear) else "1 bit"
        for kept in (plain, f"{plain}, shift"):  # the file says whether there is a shift
            other = nn.Sequential(both(kept)[1])
            other.load_state_dict(state)
            assert same_bits(other(X).detach(), expected)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_bits(copied(X).detach(), expected)
        assert same_bits(copied.to("meta").to_empty(device="cpu").state_dict()["0.scheme"],
                         model.state_dict()["0.scheme"])  # fmt: skip


# What an exported model may call: the shift of x, its codes, and the product.
OF_X = {
    "aten._assert_tensor_metadata.default", "aten.to.dtype", "aten.add.Tensor",
    "qfx.quantize.default", str(getitem),
    "export.access_subclass_inner_tensor.default",  # the packed weight
    "qfx.linear.default", "qfx.linear_dynamic.default", "qfx.binary_linear.default",
}  # fmt: skip


@BY_FEW
def test_an_exported_model_packs_nothing(row: str) -> None:
    """Its calls are of buffers that are packed, and of x."""
    _, served = both(row)
    model = nn.Sequential(served)
    rows = ({0: torch.export.Dim("rows")},)
    with torch.no_grad():
        program = torch.export.export(model, (X,), dynamic_shapes=rows)
        called = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
        said = program.graph_signature
        held = {*said.inputs_to_buffers.values(), *said.inputs_to_parameters.values()}
        assert called <= OF_X and {"0.packed", "0.weight"} & held
        for x in (X, X[:2]):
            assert same_bits(program.module()(x), model(x))


@pytest.mark.parametrize("row, backend", every(FEW, ["aot_eager", "qfx"]))
def test_a_compiled_model_goes_on_when_it_is_converted(row: str, backend: str) -> None:
    model = nn.Sequential(trained(row))
    options: Any = {"inner": "eager"} if backend == "qfx" else None
    compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
    with torch.no_grad():
        before = compiled(X)
        qfx.convert(compiled)
        assert isinstance(model[0], Linear | SignLinear)
        assert same_bits(compiled(X), model(X)) and same_bits(compiled(X), before)


# --- whole models ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, K), nn.Linear(K, K, bias=False)
        self.norm = nn.LayerNorm(K)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Nested; one linear under two names, one weight under two modules, one linear left float."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, K)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].up = self.blocks[0].up
        self.layer = nn.TransformerEncoderLayer(K, 2, 32, batch_first=True)
        self.tied = nn.Linear(K, 50, bias=False)
        self.head = nn.Linear(50, 4)
        self.tied.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.tied(self.layer(x)))


IDS = torch.arange(12).reshape(2, 6)
PREPARE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "lsq": lambda m: qfx.prepare_qat(
        m, IDS, config=qfx.Config(scheme=SCHEMES["learned"], skip=("head",))
    ),
    "binary": lambda m: qfx.prepare_binary(m, IDS, config=qfx.Config(skip=("head",)), shift=True),
}


@pytest.mark.filterwarnings("ignore:qfx.prepare_.*MultiheadAttention")
@pytest.mark.parametrize("how", PREPARE)
def test_a_whole_model(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = PREPARE[how](Net()).eval()
    expected = model(IDS).detach()
    caplog.set_level(logging.INFO, "qfx")
    assert qfx.convert(model) is model
    assert "convert: 7 of 7 linears replaced" in caplog.text
    assert same_bits(model(IDS).detach(), expected)
    kind = Linear if how == "lsq" else SignLinear
    assert model.blocks[1].up is model.blocks[0].up and type(model.blocks[0].up) is kind
    assert type(model.head) is nn.Linear and type(model.tied) is kind
    assert "embed.weight" in dict(model.named_parameters())  # who else has a weight keeps it
    modules = dict(model.named_modules())
    assert qfx.convert(model) is model and dict(model.named_modules()) == modules
    other = qfx.convert(PREPARE[how](Net().requires_grad_(False))).eval()
    other.load_state_dict(model.state_dict())
    assert same_bits(other(IDS).detach(), expected)
    state = model.state_dict() | {"tied.scale": -model.tied.scale}
    with pytest.raises(RuntimeError, match=r"nothing was loaded:\n\ttied\.scale holds"):
        model.load_state_dict(state)


def test_beside_quantize_() -> None:
    """Each takes its own modules, in any order."""
    first, second = (nn.Sequential(trained("learned"), nn.Linear(N, 4)).eval() for _ in range(2))
    second.load_state_dict(first.state_dict())
    qfx.convert(qfx.quantize_(first)), qfx.quantize_(qfx.convert(second))
    assert [type(m) for m in (*first, *second)] == [Linear] * 4
    assert same_bits(first(X).detach(), second(X).detach())
    with pytest.raises(ValueError, match=r"0 are linears with learned steps: qfx\.convert"):
        qfx.quantize_(nn.Sequential(trained("learned")))


def test_explain_shows_what_is_served() -> None:
    binary = BinaryLinear(N, K)
    binary.observe(X[:, :N])
    model = qfx.convert(nn.Sequential(trained("learned"), nn.ReLU(), binary))
    reasons = [row.reason for row in qfx.explain(model, X).rows]
    assert reasons == ["an int8 module, qfx.nn.Linear", "a 1-bit module, qfx.nn.SignLinear"]


# --- what is refused ---


def _unfitted() -> nn.Module:
    return LSQLinear(K, N, scheme=SCHEMES["learned"])


def _set(row: str, **values: float) -> nn.Module:
    module = trained(row)
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name).view(-1)[-1] = value
    return module


class Own(LSQLinear):
    pass


FAULTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "never fitted": (_unfitted, r"0: its x_log_step is NaN: it was not fitted to data \(module.ob"),
    "never fitted, 1 bit": (lambda: BinaryLinear(K, N), "0: its x_log_scale is NaN: it was not fi"),
    "diverged": (lambda: _set("rows", w_log_step=torch.nan), "w_log_step is NaN: .* has diverged"),
    "infinite step": (
        lambda: _set("learned", x_log_step=100.0),
        "its x_log_step is 100, and so the step itself infinite",
    ),
    "weight": (lambda: _set("rows", weight=torch.inf), "its weight holds NaN or infinity"),
    "shift": (lambda: _set("1 bit, shift", shift=torch.nan), "its shift holds NaN or infinity"),
    "name": (
        lambda: setattr(m := trained("rows"), "codes", 1) or m,
        "its attribute 'codes' would hide that of the module in its place: rename it",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_half_trained_modules_are_refused_and_nothing_is_changed(name: str) -> None:
    make, phrase = FAULTS[name]
    model = nn.Sequential(make(), nn.ReLU(), LSQLinear(N, K))
    modules = list(model)
    with pytest.raises(ValueError, match=f"(?s)^convert: 1 of .*nothing was changed:.*{phrase}"):
        qfx.convert(model)
    assert list(model) == modules


def test_models_in_which_nothing_was_trained_are_refused() -> None:
    with pytest.raises(ValueError, match="no LSQLinear, LSQConv or BinaryLinear inside it"):
        qfx.convert(nn.Sequential(nn.Linear(K, N)))
    with pytest.raises(ValueError, match=r"is a LSQLinear itself.*nn\.Sequential\(module\)"):
        qfx.convert(trained("rows"))


@pytest.mark.parametrize("name", ["subclass", "float64"])
def test_what_is_not_served_stays_with_one_warning(name: str) -> None:
    odd = Own(K, N) if name == "subclass" else trained("rows").double()
    model = nn.Sequential(trained("rows"), nn.Linear(N, K), odd)
    reason = "Own, a subclass of LSQLinear" if name == "subclass" else "its weight is float64"
    with pytest.warns(UserWarning, match=rf"qfx\.convert: 1 of 2 linears stay .*2 \({reason}"):
        qfx.convert(model)
    assert type(model[0]) is Linear and model[2] is odd


@pytest.mark.parametrize("row", ["rows, shift", "1 bit, shift"])
def test_a_shift_of_another_size_than_x_is_no_broadcast(row: str) -> None:
    for module in both(row):
        with pytest.raises(ValueError, match="x has K=1, but the shift added to it has 24"):
            module(X[:, :1])


# --- the file of a SignLinear ---


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "without scheme": (lambda s: s.pop("scheme"), "scheme is missing, which says"),
    "another module": (
        lambda s: s.update(scheme=Linear(K, N).state_dict()["scheme"]),
        "that of a Linear, not of a SignLinear",
    ),
    "without signs": (lambda s: s.pop("signs"), "signs is missing"),
    "without shift": (lambda s: s.pop("shift"), "shift is missing"),
    "signs of another type": (lambda s: s.update(signs=s["signs"].char()), "signs is torch.int8"),
    "too few signs": (lambda s: s.update(signs=s["signs"][:, 1:]), r"\[16, 2\], expected .*16, 3"),
    "scale": (lambda s: s["scale"].mul_(-1), "scale holds .* not finite and positive"),
    "x_scale": (lambda s: s["x_scale"].fill_(torch.inf), "x_scale holds inf"),
    "shift": (lambda s: s["shift"].fill_(torch.nan), "shift holds nan at"),
    "bias": (lambda s: s.update(bias=s["bias"][1:]), r"bias is torch.float32 \[15\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_states_that_do_not_fit_are_refused_whole(name: str) -> None:
    change, phrase = WRONG[name]
    _, served = both("1 bit, shift")
    state = {n: t.clone() for n, t in served.state_dict().items()}
    change(state)
    other = SignLinear(K, N)
    before, y = {n: t.clone() for n, t in other.state_dict().items()}, other(X).detach()
    with pytest.raises(RuntimeError, match=phrase):
        other.load_state_dict(state)
    assert same_bits(other(X).detach(), y)
    assert all(same_bits(other.state_dict()[n], t) for n, t in before.items())


@given(POSITIVE, POSITIVE, SEEDS, st.booleans())
def test_signs_are_kept_by_every_layout(n: int, k: int, seed: int, zeros: bool) -> None:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).mul(not zeros)
    octets = octets_of(binary_pack(w), n, k)
    assert same_bits(cuda_octets_of(cuda_binary_pack(w), n, k), octets)
    assert same_bits(packed_octets(octets, k), torch.ops.qfx.binary_pack(w))
    for i, byte in enumerate(octets[0].tolist()):
        assert byte == sum(1 << j for j, v in enumerate(w[0, 8 * i : 8 * i + 8]) if v >= 0)
