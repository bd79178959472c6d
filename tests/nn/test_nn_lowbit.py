"""qfx.nn.Linear of weights of 4 and 5 bits: what is saved of them, what is refused, and weights
with minimums, which files bring."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qfx
from qfx.nn.scheme_tensor import fields_of, written
from qfx.nn.serialized_weight import codes_of_stream, stream_bytes, stream_of
from qfx.values.config import PRESETS
from tests.conftest import same_bits
from tests.lib.pairs import every, pairs
from tests.lib.strategies import SEEDS, SIZES
from tests.nn.test_nn_linear import outputs

Q = qfx.QSpec
NAMES = ("w4a8", "w5a8", "w4", "w5")
BY_NAMES = pytest.mark.parametrize("name", NAMES)
N, K = 33, 200
X = torch.randn(7, K, generator=torch.Generator().manual_seed(0))


def made(name: str, n: int = N, k: int = K, bias: bool = True) -> qfx.nn.Linear:
    torch.manual_seed(0)
    return qfx.nn.Linear.from_float(nn.Linear(k, n, bias), PRESETS[name])


def _kinds(module: nn.Module) -> dict[str, Any]:
    return {name: (t.dtype, t.shape) for name, t in module.state_dict().items()}


def saved(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


# --- what is saved ---


@given(SIZES, SIZES, st.sampled_from([4, 5]), SEEDS)
def test_a_stream_of_codes_has_an_inverse(n: int, k: int, bits: int, seed: int) -> None:
    limit, g = 1 << (bits - 1), torch.Generator().manual_seed(seed)
    codes = torch.randint(-limit, limit, (n, k), generator=g).char()
    stream = stream_of(codes, bits)
    assert stream.dtype == torch.uint8 and stream.shape == (n, stream_bytes(k, bits))
    assert torch.equal(codes_of_stream(stream, bits, k), codes)


@pytest.mark.parametrize("bits", [4, 5])
def test_a_stream_is_what_the_module_says(bits: int) -> None:
    """u = code + 2^(bits - 1), the first k in the lowest bits: eight codes are `bits` bytes."""
    codes = torch.arange(8).char()[None] - (1 << (bits - 1))
    (row,) = stream_of(codes, bits).tolist()
    number = sum(byte << 8 * i for i, byte in enumerate(row))
    assert [number >> bits * k & (1 << bits) - 1 for k in range(8)] == [*range(8)]


@pytest.mark.parametrize("name, most", [("w4a8", 0.56), ("w4", 0.56), ("w5a8", 0.69), ("w5", 0.69)])
def test_takes_little_memory_and_little_of_a_file(name: str, most: float) -> None:
    """Of what the same linear takes in int8."""
    module, int8 = (made(of, 256, 1024, bias=False) for of in (name, "w8a8"))
    for held in (lambda m: m.state_dict().values(), lambda m: [*m.buffers()]):
        few, many = (sum(t.nbytes for t in held(m)) for m in (module, int8))
        assert few <= most * many


@pytest.mark.parametrize("name, shape", every(NAMES, [(0, 64), (8, 0), (0, 0)]))
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_weight_without_elements(name: str, shape: tuple[int, int]) -> None:
    n, k = shape
    module, other = made(name, n, k), qfx.nn.Linear(k, n, scheme=PRESETS[name])
    other.load_state_dict(module.state_dict())
    x = torch.ones(5, k, requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert y.shape == (5, n) and torch.equal(other(x), y)
    assert torch.equal(y, module.bias.expand(5, n)) and x.grad is not None


@BY_NAMES
def test_a_module_without_values_says_what_it_would_hold(name: str) -> None:
    with torch.device("meta"):
        module = qfx.nn.Linear(K, N, scheme=PRESETS[name])
    wanted = made(name)
    for without in (module, copy.deepcopy(wanted).to("meta")):
        assert _kinds(without) == _kinds(wanted)
    empty = module.to_empty(device="cpu")
    empty.load_state_dict(saved(wanted))
    assert torch.equal(outputs(empty, X), outputs(wanted, X))


def test_int8_codes_of_an_earlier_file_keep_their_scheme() -> None:
    """What `w4a8` was: codes of 4 bits in 8."""
    scheme = qfx.Scheme(x=Q(symmetric=False), w=Q(bits=4, symmetric=False, group=64))
    first = qfx.nn.Linear.from_float(nn.Linear(K, N), scheme)
    second = made("w4a8")
    second.load_state_dict(saved(first))
    assert second.scheme == scheme and torch.equal(outputs(second, X), outputs(first, X))


# --- what is refused ---

State = dict[str, Any]
WRONG: dict[str, tuple[Callable[[State], Any], str]] = {
    "truncated codes": (
        lambda s: s.update(codes=s["codes"][:, :-1]),
        r"codes is torch.uint8 \[33, 99\], expected torch.uint8 \[33, 100\]",
    ),
    "codes in 8 bits": (
        lambda s: s.update(codes=torch.zeros(N, K, dtype=torch.int8)),
        r"codes is torch.int8 \[33, 200\], expected torch.uint8 \[33, 100\]",
    ),
    "other bits": (
        lambda s: s["scheme"].__setitem__(7, 5),
        r"codes is torch.uint8 \[33, 100\], expected torch.uint8 \[33, 125\]",
    ),
    "a wrong group": (
        lambda s: s["scheme"].__setitem__(10, 128),
        r"scale is torch.bfloat16 \[33, 4\], expected torch.bfloat16 \[33, 2\]",
    ),
    "a group without kernels": (
        lambda s: s["scheme"].__setitem__(10, 96),
        "codes of bits=4 in groups of 96 cannot be packed: there are kernels for 4 and 5 bits",
    ),
    "bits without kernels": (
        lambda s: s["scheme"].__setitem__(7, 6),
        "codes of bits=6 in groups of 64 cannot be packed",
    ),
    "another half type": (
        lambda s: s["scheme"].__setitem__(19, 1),
        r"scale is torch.bfloat16 \[33, 4\], expected torch.float16 \[33, 4\]",
    ),
    "scales in float32": (
        lambda s: s.update(scale=s["scale"].float()),
        r"scale is torch.float32 \[33, 4\], expected torch.bfloat16 \[33, 4\]",
    ),
    "codes of 8 bits by the scheme": (
        lambda s: s["scheme"].__setitem__(17, 0),
        r"codes is torch.uint8 \[33, 100\], expected torch.int8 \[33, 200\]",
    ),
    "no zero points": (
        lambda s: s.pop("zero_point"),
        "zero_point is missing: scheme says xs8r_wa4p",
    ),
    "a zero point that is no code": (
        lambda s: s["zero_point"].__setitem__((0, 0), 8),
        r"zero_point holds 8, which is outside -8..7",
    ),
    "a minimum too": (
        lambda s: s.update(minimum=s["scale"]),
        "minimum is there in vain: scheme says xs8r_wa4p64",
    ),
    "a minimum by the scheme": (
        lambda s: s["scheme"].__setitem__(18, 1),
        "zero_point is there in vain: scheme says xs8r_wa4p64",
    ),
    "an infinite scale": (
        lambda s: s["scale"].__setitem__((32, 3), torch.inf),
        r"scale holds inf at \[32, 3\], which is not finite",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_changes_nothing(what: str) -> None:
    change, phrase = WRONG[what]
    module = made("w4a8")
    state, y = saved(module), outputs(module, X)
    change(state)
    for into in (module, qfx.nn.Linear(K, N)):
        with pytest.raises(RuntimeError, match=phrase):
            into.load_state_dict(state)
    assert torch.equal(outputs(module, X), y)


# --- minimums ---


def with_minimums(bits: int, group: int, half: torch.dtype, x: Q | None) -> tuple[State, Tensor]:
    """A state dict, and the float64 weight that it is."""
    g, each = torch.Generator().manual_seed(0), (N, -(-K // group))
    spec = Q(bits, symmetric=False, group=group, packed=True)
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (N, K), generator=g).char()
    scale, minimum = ((torch.rand(*each, generator=g) + 0.1).to(half) for _ in range(2))
    fields = fields_of(qfx.Scheme(x=x, w=spec)) | {"minimum": True, "half": half}
    state = {"codes": stream_of(codes, bits), "scale": scale, "minimum": -minimum}
    state |= {"bias": torch.zeros(N), "scheme": written("Linear", fields)}
    scale_nk, minimum_nk = (t.double().repeat_interleave(group, 1)[:, :K] for t in (scale, minimum))
    return state, (codes.double() + (1 << (bits - 1))) * scale_nk - minimum_nk


@pytest.mark.parametrize(
    "bits, x, half",
    pairs([4, 5], [None, Q(), Q(symmetric=False), Q(group=64)], [torch.bfloat16, torch.float16]),
    ids=str,
)
def test_minimums_are_kept(bits: int, x: Q | None, half: torch.dtype) -> None:
    """By files, copies and writes; and they count in outputs and in gradients."""
    state, w = with_minimums(bits, 64, half, x)
    module = made("w4a8")
    module.load_state_dict(state)
    assert torch.equal(module.weight.double(), w.float().double())
    again = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    for each in (module, again):
        kept = saved(each)
        assert kept.keys() == state.keys() and all(same_bits(kept[n], state[n]) for n in state)
    leaf = X.clone().requires_grad_()
    y = module(leaf)
    assert torch.equal(y, outputs(module, X)) and torch.equal(y, outputs(again, X))
    x_hat = X if x is None else qfx.dequantize(qfx.quantize(X, x))
    size = x_hat.double().abs() @ w.abs().t()
    assert ((y.double() - x_hat.double() @ w.t()).abs() <= K * 2.0**-24 * size).all()
    grad = torch.randn(7, N, generator=torch.Generator().manual_seed(1))
    y.backward(grad)
    bound = (N + 8) * 2.0**-24 * (grad.double().abs() @ w.abs())
    assert ((leaf.grad.double() - grad.double() @ w).abs() <= bound).all()  # type: ignore[union-attr]


def test_a_write_to_a_weight_with_minimums_is_taken_back() -> None:
    state, _ = with_minimums(4, 32, torch.float16, Q())
    module = made("w4a8")
    module.load_state_dict(state)
    change = 0.1 * torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    before, y = module.weight.dequantize(), outputs(module, X)
    module.weight.data += change
    assert qfx.sqnr(before + change, module.weight.detach()) > 15
    module.weight.data -= change
    assert torch.equal(outputs(module, X), y) and same_bits(
        saved(module)["minimum"], state["minimum"]
    )


@BY_NAMES
def test_what_a_file_lacks_is_told_by_its_names(name: str) -> None:
    """All that the module saves, though it holds it in one tensor; nothing that it has not."""
    module = made(name)
    found = module.load_state_dict({}, strict=False)
    assert {*found.missing_keys} == {*module.state_dict()} and not found.unexpected_keys
    state, _ = with_minimums(4, 64, torch.float16, Q())
    module.load_state_dict(state)
    assert {*module.load_state_dict({}, strict=False).missing_keys} == {*state}
