"""State dicts of quantized modules: what is loaded is what was saved, scheme and all, or an error
that changes nothing."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from qfx.nn import Linear
from qfx.nn.scheme_tensor import FIELDS, FORMAT, LENGTH
from tests.conftest import same_bits
from tests.lib.pairs import LONG, every
from tests.lib.strategies import SEEDS, recipes
from tests.nn.test_nn_linear import BY_VARIED, SCHEMES, K, N, made, outputs

State = dict[str, Any]


def saved(module: nn.Module) -> State:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


# --- every pair of schemes ---


@BY_VARIED
def test_any_module_takes_the_scheme_of_the_file(row: str) -> None:
    """And after it is as if it had been made so."""
    first = made(row)
    state, expected = saved(first), outputs(first)
    for other in SCHEMES:
        second = copy.deepcopy(made(other))
        second.load_state_dict(state)
        assert torch.equal(outputs(second), expected), f"{row} into {other}"
        assert repr(second) == repr(first) and same(saved(second), state)


@given(st.data(), st.sampled_from([1, 48, 64, 130]), st.integers(1, 40), SEEDS)
def test_any_pair_of_schemes(data: st.DataObject, k: int, n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear, x = nn.Linear(k, n), torch.randn(3, k, generator=generator)
    linear.weight.data = torch.randn(n, k, generator=generator)
    first, second = (Linear.from_float(linear, data.draw(recipes(n, k))) for _ in range(2))
    expected, state = outputs(first, x), saved(first)
    second.load_state_dict(state)
    assert same_bits(outputs(second, x), expected) and same(saved(second), state)


def _by_torch(module: nn.Module, into: nn.Module, folder: Path) -> None:
    torch.save(module.state_dict(), folder / "state.pt")
    into.load_state_dict(torch.load(folder / "state.pt", weights_only=True))


def _by_safetensors(module: nn.Module, into: nn.Module, folder: Path) -> None:
    save_file(module.state_dict(), folder / "state.safetensors")
    into.load_state_dict(load_file(folder / "state.safetensors"))


def _by_assigning(module: nn.Module, into: nn.Module, folder: Path) -> None:
    into.load_state_dict(module.state_dict(), assign=True)


def _leniently(module: nn.Module, into: nn.Module, folder: Path) -> None:
    found = into.load_state_dict(module.state_dict() | {"more": torch.ones(1)}, strict=False)
    assert found.missing_keys == [] and found.unexpected_keys == ["more"]


def _from_meta(module: nn.Module, into: nn.Module, folder: Path) -> None:
    into.to("meta").load_state_dict(saved(module), assign=True)


def _by_distributed(module: nn.Module, into: nn.Module, folder: Path) -> None:
    set_model_state_dict(into, get_model_state_dict(module))


WAYS = [_by_torch, _by_safetensors, _by_assigning, _leniently, _from_meta, _by_distributed]
INTO = ["xs8r_ws8r", "xs8r_ws4g64", "static, factor, rotation"]


@pytest.mark.parametrize("row, way", every(SCHEMES, list(itertools.product(WAYS, INTO))))
def test_however_it_is_kept(row: str, way: tuple[Callable[..., None], str], tmp_path: Path) -> None:
    keep, into = way
    first, second = nn.Sequential(made(row)), nn.Sequential(made(into))
    keep(first, second, tmp_path)
    assert torch.equal(outputs(second), outputs(first)) and same(saved(second), saved(first))
    third = pickle.loads(pickle.dumps(copy.deepcopy(second)))
    assert torch.equal(outputs(third), outputs(first)) and same(saved(third), saved(first))


@BY_VARIED
def test_a_distributed_checkpoint_fills_a_model_without_values(row: str, tmp_path: Path) -> None:
    """As it is read: into the very tensors of a model that was made on meta."""
    first, second = nn.Sequential(made(row)), nn.Sequential(made(row))
    checkpoint.save(first.state_dict(), checkpoint_id=tmp_path)
    second.to("meta").to_empty(device="cpu")
    state = second.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path)
    second.load_state_dict(state)
    assert torch.equal(outputs(second), outputs(first))


def test_a_compiled_module_follows_the_scheme() -> None:
    module = made("xs8r_ws8r")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for row in ("xs8r_ws8r_h64", "xs8r_ws4g64", "static", "xs8r_ws8r"):
        module.load_state_dict(saved(made(row)))
        assert torch.equal(outputs(compiled), outputs(made(row)))


def test_what_is_loaded_is_a_copy_unless_assigned() -> None:
    for assign in (False, True):
        first, second = made("static, factor, rotation"), made("xs8r_ws8r")
        state = saved(first)
        second.load_state_dict(state, assign=assign)
        before = saved(second)
        state["factor"].fill_(1.0)
        assert torch.equal(second.factor, state["factor"]) == assign
        if not assign:
            for value in filter(Tensor.is_floating_point, state.values()):
                value.fill_(1.0)
            assert same(saved(second), before)


# --- a state dict with one change ---

DTYPES = (
    torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.complex64,
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 7, -128, 127, 128, 2**31 - 1, torch.nan, torch.inf, -torch.inf, 1e-42)
MUTATED = (
    "xs8r_ws8r", "xa4r_ws2r", "xs8r_ws8c_h64", "xs8t_ws8t", "xs8g32_ws8r", "xs8r_wa4g128",
    "xs8r_wa4p64_h64", "wa5p128",
    "static, factor, rotation", "static, groups",
    "static with zero point",
)  # fmt: skip


def _values(value: Tensor) -> Iterator[Any]:
    yield from (value.to(dtype) for dtype in DTYPES if dtype != value.dtype)
    yield from (value[None], value[1:], torch.cat([value, value]), value.t().contiguous())
    yield from (value.to_sparse(), value.to("meta"), value.tolist(), None, "text")
    for number in NUMBERS:
        info = torch.finfo if value.is_floating_point() else torch.iinfo
        fits = value.is_floating_point() or (
            number == number and abs(number) <= info(value.dtype).max
        )
        if fits:
            changed = value.clone()
            changed.view(-1)[-1] = number
            yield changed


def _schemes(value: Tensor, row: int) -> Iterator[Tensor]:
    """In the quick profile a third of them, another one in the next row."""
    each = list(itertools.product(range(LENGTH), (-1, 0, 1, 2, 3, 8, 64, 99)))
    for place, number in each if LONG else each[row % 3 :: 3]:
        changed = value.clone()
        changed[place] = number
        yield changed


def mutations(state: State, row: int) -> Iterator[tuple[str, State]]:
    for name, value in state.items():
        if name != "bias":  # of which torch tells afterwards
            yield f"without {name}", {n: v for n, v in state.items() if n != name}
        for i, changed in enumerate(
            (*_values(value), *(_schemes(value, row) if name == "scheme" else ()))
        ):
            yield f"{name} {i}", {**state, name: changed}
    extra = {"zero_point": torch.zeros(N, 1).int(), "factor": torch.ones(K)}
    extra |= {"x_scale": torch.ones(1), "x_zero_point": torch.zeros(1).int()}
    extra |= {"shift": torch.ones(K), "minimum": torch.ones(N, 3).bfloat16()}
    yield from ((f"with {n}", {**state, n: v}) for n, v in extra.items() if n not in state)


def _loaded(module: Linear, state: State) -> bool:
    """Whether it was; if not, nothing has changed."""
    before, y = saved(module), outputs(module)
    try:
        module.load_state_dict(state)
    except RuntimeError as why:
        assert "Error(s) in loading" in str(why)
        assert same(saved(module), before) and torch.equal(outputs(module), y)
        return False
    return True


# Every second one, and so each third of the changes of a scheme twice.
@pytest.mark.parametrize("row", MUTATED if LONG else MUTATED[::2])
def test_one_change_gives_what_the_file_says_or_an_error(row: str) -> None:
    """Whatever the module was before; what is taken is all there, bit for bit."""
    loaded, count = [], 0
    for name, state in mutations(saved(made(row)), MUTATED.index(row)):
        both = [copy.deepcopy(made(row)), Linear(K, N)]
        took = [_loaded(module, state) for module in both]
        assert took[0] == took[1], name
        count += 1
        if not took[0]:
            continue
        loaded.append(name)
        bias = {"bias": state["bias"].to(torch.float32)}
        assert all(same(saved(module), {**state, **bias}) for module in both), name
        assert same_bits(outputs(both[0]), outputs(both[1])), name
    assert count > (350 if LONG else 180) and 5 < len(loaded) < 110, (count, loaded)


WRONG: dict[str, tuple[Callable[[State], Any], str]] = {
    "no scheme": (
        lambda s: s.pop("scheme"),
        r"'scheme' is not there, and .*say so: state_dict\['scheme'\] = model.state_dict",
    ),
    "codes without the rest": (
        lambda s: [s.pop(n) for n in ("scale", "factor")],
        "scale is missing: scheme says xs8T_ws8r_h64",
    ),
    "a factor too many": (
        lambda s: s["scheme"].__setitem__(14, 0),
        "factor is there in vain: scheme says xs8T_ws8r_h64",
    ),
    "a later format": (
        lambda s: s["scheme"].__setitem__(0, 2),
        "scheme has format 2, and this qfx reads format 1: use",
    ),
    "a later field": (
        lambda s: s["scheme"].__setitem__(21, 5),
        "scheme has 5 in place 21, which this version of qfx does not know",
    ),
    "a later value": (
        lambda s: s["scheme"].__setitem__(9, 3),
        "scheme has 3 for w.axes, which this version of qfx does not know",
    ),
    "another module": (
        lambda s: s["scheme"].__setitem__(1, 2),
        "scheme is that of a LSQLinear, not of a Linear",
    ),
    "no scheme that there is": (
        lambda s: s["scheme"].__setitem__(7, 9),
        "scheme: QSpec: bits=9 is outside 2..8",
    ),
    "rotation": (
        lambda s: s["scheme"].__setitem__(13, 32),
        "scheme: Scheme: rotation=32 is none of 0, 16, 64",
    ),
    "a negative scale": (
        lambda s: s["scale"].__setitem__(3, -1.0),
        r"scale holds -1.0 at \[3\], which is not finite and positive",
    ),
    "a scale of zero": (lambda s: s["scale"].__setitem__(39, 0.0), r"scale holds 0.0 at \[39\]"),
    "the type of rows": (
        lambda s: s["scheme"].__setitem__(20, 1),
        "scheme has torch.bfloat16 for dtype, which embeddings alone have",
    ),
    "the type of scales that are not packed": (
        lambda s: s["scheme"].__setitem__(19, 1),
        "scheme: xs8T_ws8r_h64 has its scales in float32",
    ),
    "a NaN scale": (lambda s: s["x_scale"].fill_(torch.nan), r"x_scale holds nan at \[0\]"),
    "a complex scale": (
        lambda s: s.update(scale=s["scale"] + 1j),
        r"scale is torch.complex64 \[40\], expected torch.float32 \[40\]",
    ),
    "an infinite factor": (
        lambda s: s["factor"].__setitem__(0, torch.inf),
        r"factor holds inf at \[0\]",
    ),
    "codes above": (
        lambda s: (s["scheme"].__setitem__(7, 7), s["codes"].clamp_(min=-64)),  # bits of the weight
        r"codes holds \d+, which is outside -64\.\.63",
    ),
    "codes below": (
        lambda s: (s["scheme"].__setitem__(7, 7), s["codes"].clamp_(max=63)),
        r"codes holds -\d+, which is outside -64\.\.63",
    ),
    "codes of another shape": (
        lambda s: s.update(codes=s["codes"][:, 1:]),
        r"codes is torch.int8 \[40, 191\], expected torch.int8 \[40, 192\]",
    ),
    "a bias": (
        lambda s: s.update(bias=torch.ones(40).int()),
        r"bias is torch.int32 \[40\], expected torch.float32 or",
    ),
    "no tensor": (lambda s: s.update(scale=[1.0]), "scale is of type list, expected a tensor"),
    "no values": (
        lambda s: s.update(scheme=s["scheme"].to("meta")),
        "scheme has no values, so nothing says what the codes mean",
    ),
    "meta": (
        lambda s: s.update(codes=s["codes"].to("meta")),
        "codes: the file is on the meta device; load_state_dict with assign=True",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_error_says_what_is_wrong(name: str) -> None:
    change, phrase = WRONG[name]
    module = made("static, factor, rotation")
    state = saved(module)
    change(state)
    with pytest.raises(RuntimeError, match=phrase):
        module.load_state_dict(state)
    if name != "meta":
        with pytest.raises(RuntimeError, match=phrase):
            module.load_state_dict(state, strict=False)


def test_what_an_earlier_qfx_saved_loads_where_the_user_says_how() -> None:
    first, second = nn.Sequential(made("xs8r_ws8r_h64")), nn.Sequential(made("xs8r_ws8r_h64"))
    state = saved(first)
    del state["0.scheme"]
    with pytest.raises(RuntimeError, match=r"'0.scheme' is not there"):
        second.load_state_dict(state)
    state["0.scheme"] = second.state_dict()["0.scheme"]
    second.load_state_dict(state)
    assert torch.equal(outputs(second), outputs(first))


def test_the_rows_of_the_table_stay_where_they_are() -> None:
    """Files have them so: new ones come behind, and there is room."""
    assert FORMAT == 1 and LENGTH == 32
    assert list(FIELDS) == [
        "module", "x.bits", "x.symmetric", "x.axes", "x.group", "x.static", "w.bits", "w.symmetric",
        "w.axes", "w.group", "w.static", "backward", "rotation", "factor", "x_zero_point",
        "shift", "w.packed", "minimum", "half", "dtype",
    ]  # fmt: skip
    module = made("static, factor, rotation")
    head = [1, 1, 8, 1, 1, 0, 1, 8, 1, 0, 0, 0, 0, 64, 1, 0]
    assert module.state_dict()["scheme"].tolist() == head + [0] * 16
