"""Which linears stay float, and how that is told."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor

import qfx
from qfx.ops.single_tensors import sqnr
from tests.lib.pairs import every
from tests.lib.prepared import NEW, PREPARE, K, X


class Own(nn.Linear):
    pass


def _of_two(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(TwoTensor(linear.weight.data, linear.weight.data))
    return linear


def _with(value: float) -> nn.Linear:
    linear = nn.Linear(K, K)
    linear.weight.data[3, 4] = value
    return linear


def _sparse(how: str) -> nn.Linear:
    linear = nn.Linear(K, K)
    linear.weight = nn.Parameter(getattr(torch.eye(K), how)(), requires_grad=False)
    return linear


def _empty(k: int, n: int) -> nn.Linear:
    linear = nn.Linear(1, 1)
    linear.weight, linear.bias = nn.Parameter(torch.ones(n, k)), nn.Parameter(torch.ones(n))
    linear.in_features, linear.out_features = k, n
    return linear


def _projected(attention: nn.MultiheadAttention) -> nn.MultiheadAttention:
    attention.out_proj = nn.Linear(K, K)  # type: ignore[assignment]
    return attention


STAYS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Own(K, K), r"1 \(Own, a subclass of nn.Linear\)"),
    "float64": (lambda: nn.Linear(K, K).double(), r"1 \(its weight is float64; int8 serves"),
    "float8": (
        lambda: nn.Linear(K, K).to(torch.float8_e4m3fn),
        r"1 \(its weight is float8_e4m3fn; int8 serves float32, bfloat16 and float16\)",
    ),
    "NaN": (lambda: _with(torch.nan), r"1 \(its weight holds NaN or infinity\)"),
    "infinity": (lambda: _with(-torch.inf).bfloat16(), r"1 \(its weight holds NaN or infinity\)"),
    "huge": (lambda: _with(3e38), r"1 \(its weight holds 3e\+38: scales above 1.27e\+30 may over"),
    "sparse": (lambda: _sparse("to_sparse"), r"1 \(its weight is of the layout torch.sparse_coo"),
    "sparse rows": (lambda: _sparse("to_sparse_csr"), r"1 \(its .* layout torch.sparse_csr"),
    "mkldnn": (lambda: _sparse("to_mkldnn"), r"1 \(its weight is of the layout torch._mkldnn"),
    "complex": (lambda: nn.Linear(K, K, dtype=torch.complex64), r"1 \(its weight is comple"),
    "no inputs": (lambda: _empty(0, K), r"1 \(its weight \[32, 0\] has no elements\)"),
    "no outputs": (lambda: _empty(K, 0), r"1 \(its weight \[0, 32\] has no elements\)"),
    "tensor subclass": (lambda: _of_two(nn.Linear(K, K)), r"1 \(its weight is a TwoTensor, a ten"),
    "lazy": (lambda: nn.LazyLinear(K), r"1 \(LazyLinear: its weight has no shape yet, run the mod"),
    "attention": (
        lambda: nn.MultiheadAttention(K, 2),
        r"1.out_proj \(nn.MultiheadAttention reads its weight itself; torch.compile runs",
    ),
    "attention with a projection of the user's": (
        lambda: _projected(nn.MultiheadAttention(K, 2)),
        r"1.out_proj \(nn.MultiheadAttention reads its weight itself",
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


@pytest.mark.parametrize("row, how", every(STAYS, PREPARE))
def test_linears_that_nobody_left_out_stay_with_one_warning(row: str, how: str) -> None:
    make, phrase = STAYS[row]
    m, said = Beside(make()), how.split(",")[0]
    with pytest.warns(UserWarning, match=f"^qfx.{said}: 1 of 2 linears stay.*{phrase}") as caught:
        PREPARE[how](m)
    assert len(caught) == 1 and "tests" in Path(caught[0].filename).parts
    assert type(m.get_submodule("0")) in NEW
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PREPARE[how](Beside(make()), qfx.Config(skip=("1",)))
        PREPARE[how](Beside(make()), qfx.Config(only=("0",)))


STORED = ("NaN", "infinity", "huge", "complex", "no inputs", "no outputs")


@pytest.mark.filterwarnings("ignore:qfx.quantize_")
@pytest.mark.parametrize("row", STORED)
def test_what_stays_is_saved_and_loaded(row: str, tmp_path: Path) -> None:
    make, _ = STAYS[row]
    model = qfx.quantize_(Beside(make()))
    qfx.save(model, tmp_path)
    again = qfx.load(tmp_path, Beside(make()))
    assert torch.equal(again(X), model(X)) and type(again.get_submodule("1")) is nn.Linear


@pytest.mark.parametrize("how", ["quantize_", "prepare_qat"])
def test_sums_that_could_overflow_stay_float(how: str, tmp_path: Path) -> None:
    """Sums of signs cannot: prepare_binary takes such a linear."""
    model = Beside(nn.Linear(65793, 1))
    with pytest.warns(UserWarning, match=r"1 \(K=65793 is above 65792, where an int32 accumulator"):
        PREPARE[how](model)
    qfx.save(qfx.convert(model) if how == "prepare_qat" else model, tmp_path)
    assert type(qfx.load(tmp_path, Beside(nn.Linear(65793, 1))).get_submodule("1")) is nn.Linear


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
    assert ["a", "32x32", "float", "skipped by the pattern 'a'"] in lines
    assert ["b", "32x32", "float", "not among only=['a', 'c', 'd', 'own']"] in lines
    assert ["c", "32x32", "float", "the recipe leaves it float: too sensitive"] in lines
    assert ["own", "32x32", "float", "Own, a subclass of nn.Linear"] in lines
    assert ["d", "32x32", "Linear", "xa8r_ws8r_h64"] in lines
    assert "1 of 5 linears replaced, the model: 0.02 MB -> 0.02 MB" in caplog.text


def test_a_recipe_means_a_shared_module_by_any_of_its_names() -> None:
    shared = nn.Linear(K, K)
    m = nn.ModuleDict({"b": shared, "a": shared, "c": nn.Linear(K, K)})
    recipe = qfx.Recipe((qfx.SiteRecipe("a", 0, K, K, None, reason="too sensitive"),))
    qfx.quantize_(m, qfx.Config(recipe=recipe))
    assert m["a"] is m["b"] is shared and type(m["c"]) is qfx.nn.Linear


def test_a_second_call_says_that_the_first_took_all() -> None:
    model = qfx.quantize_(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"no nn\.Linear inside it; 0, 2 hold codes already"):
        qfx.quantize_(model)
