"""What Inductor generates around the operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache, run_and_get_code

import qfx._C as _C
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.lib.int8_calls import int8_matmuls
from tests.lib.models import Block, compiled

FEATURES = 16


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    torch._dynamo.reset()
    with fresh_cache():
        yield


@torch.library.custom_op("qfx_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Foreign(nn.Module):
    """Calls another library's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return twice(self.linear(x))


@pytest.mark.parametrize(
    "model, options, checks",
    [
        (Block(FEATURES), {}, False),
        (Block(FEATURES), {"size_asserts": True}, True),
        (Foreign(), {}, True),
        (Foreign(), {"size_asserts": False}, False),
    ],
    ids=["own", "own, asked for", "foreign", "foreign, not asked for"],
)
def test_sizes_are_checked_where_other_libraries_promise_them(
    model: nn.Module, options: dict[str, bool], checks: bool
) -> None:
    f = compiled(model, inner="inductor", **options)
    with torch.no_grad():
        _, (code,) = run_and_get_code(f, torch.randn(1, FEATURES))
    assert re.search(r"qfx_linears\(|torch\.ops\.qfx\.linear", code)
    assert bool(re.search(r"    assert_size_stride(_grouped)?\(", code)) == checks


class Wide(nn.Module):
    """Reads columns of its input, so that its linears' inputs are not contiguous; two linears read
    one input."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 3 * FEATURES, bias=bias)
        self.second = nn.Linear(FEATURES, 5, bias=bias)
        self.third = nn.Linear(FEATURES, 7, bias=not bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.first(x.transpose(0, 1)))[..., ::3]
        return self.second(x), self.third(x).abs().transpose(0, 1)


@pytest.mark.parametrize(
    "dtype, bias",
    [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
def test_direct_calls_give_the_bits_of_the_operator(dtype: torch.dtype, bias: bool) -> None:
    """For any number of rows, which becomes symbolic; and profilers count them."""
    torch.manual_seed(0)
    model = Wide(bias).to(dtype).eval()
    with torch.no_grad():
        expected = compiled(model, inner="eager")
        direct = compiled(model, inner="inductor")
        _, codes = run_and_get_code(direct, torch.randn(4, 3, FEATURES, dtype=dtype))
        for rows in (2, 7, 1, 0):
            x = torch.randn(4, rows, FEATURES, dtype=dtype)
            for y, wanted in zip(direct(x), expected(x), strict=True):
                assert torch.equal(y, wanted)
        _, calls = int8_matmuls(direct, torch.randn(4, 2, FEATURES, dtype=dtype))
    assert calls == {"qfx::linear_dynamic": 1, "qfx::linears": 1}
    assert codes[0].count("qfx_linears(") == 2 and "torch.ops.qfx" not in codes[0]


class Convolutions(nn.Module):
    """Convolutions of all kinds in a row, one of which adds a residual."""

    def __init__(self, axes: int, bias: bool) -> None:
        super().__init__()
        kind = nn.Conv2d if axes == 2 else nn.Conv1d
        self.first = kind(3, FEATURES, 3, padding=1, stride=2, bias=bias)
        self.depthwise = kind(FEATURES, FEATURES, 9, padding=4, bias=bias, groups=FEATURES)
        self.grouped = kind(FEATURES, 2 * FEATURES, 3, padding=1, bias=not bias, groups=2)
        self.last = kind(2 * FEATURES, FEATURES, 3, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return F.relu(self.last(self.grouped(self.depthwise(x))) + x)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize(
    "dtype, bias",
    [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
def test_direct_convolutions_give_the_bits_of_the_operators(
    dtype: torch.dtype, bias: bool, axes: int
) -> None:
    """For images of any size and layout; and profilers count them."""
    torch.manual_seed(0)
    model = Convolutions(axes, bias).to(dtype).eval()
    sizes = [(2, 9), (1, 4), (3, 17), (0, 5)]
    images = [torch.randn(b, *[n] * axes, 3, dtype=dtype).movedim(-1, 1) for b, n in sizes]
    images += [x.contiguous() for x in images]
    with torch.no_grad():
        expected = compiled(model, inner="eager")
        direct = compiled(model, inner="inductor")
        _, codes = run_and_get_code(direct, images[0])
        for x in images:
            assert torch.equal(direct(x), expected(x))
        _, calls = int8_matmuls(direct, images[0])
    assert calls == {"qfx::conv_dynamic": 3, "qfx::conv_depthwise": 1}
    assert codes[0].count("qfx_convolution(") == 4 and "torch.ops.qfx" not in codes[0]


def convolution_call(**changed: Any) -> Callable[[], None]:
    """Returns a call of the function by which generated code runs a 3x3 convolution of 16
    channels, or where `depthwise`, one of each of them."""
    depthwise = changed.get("depthwise", 0)
    codes = torch.ones(FEATURES, 12 if depthwise else 9 * FEATURES, dtype=torch.int8)
    weight = torch.ops.qfx.pack_weight(codes, torch.ones(FEATURES))
    x, y = torch.ones(1, 4, 4, FEATURES), torch.empty(1, 4, 4, FEATURES)
    numbers = {
        "depthwise": 0, "factor": 0, "residual": 0, "groups": 1, "x": 0, "y": 0,
        "code_bits": 8, "symmetric": 1, "per_tensor": 0, "code_group": 0, "rotation": 0,
        "bytes": weight.numel(), "bias": -1, "activation": 0,
        "n": FEATURES, "bits": 8, "group": 0, "scale_group": 0, "shift": 0,
        "batch": 1, "channels": FEATURES, "height": 4, "width": 4, "strides": (256, 1, 64, 16),
        "kernel": (3, 3), "stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "axes": 2,
    } | changed  # fmt: skip
    each = [n if isinstance(n, tuple) else (n,) for n in numbers.values()]
    return lambda: _C.convolution(x, weight, *[n for ns in each for n in ns], out=y)


@pytest.mark.parametrize(
    "changed, error",
    [
        ({"channels": 32}, "K=288 but the weight was packed for K=144"),
        ({"groups": 3}, "x has 16 channels, which 3 groups do not divide"),
        ({"kernel": (3, 0)}, r"kernel is \[3x0\], expected 2 numbers of at least 1"),
        ({"n": 8}, "N=8 is asked for but the weight was packed for N=16"),
        ({"n": 8, "depthwise": 1}, "the weight has n=8, but x has 16 channels"),
        ({"rotation": 16, "depthwise": 1}, "rotation=16 and a scale for each row"),
        ({"dilation": (1, 2), "depthwise": 1}, "dilation 2 of the last axis"),
        ({"rotation": 32}, "rotation=32, expected 0, 16 or 64"),
        ({"factor": 1}, "fewer tensors than announced"),
        ({"residual": 1}, "fewer tensors than announced"),
        ({"y": 5}, "unknown dtype"),
        ({"axes": 4}, "arguments are missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_direct_convolutions_check_what_they_know(changed: dict[str, Any], error: str) -> None:
    convolution_call()()
    with pytest.raises(RuntimeError, match=error):
        convolution_call(**changed)()


class Called(nn.Module):
    """Calls the operator itself, with operands that do not fit each other."""

    def __init__(self, factor: int, residual: int, padding: int) -> None:
        super().__init__()
        codes = torch.ones(FEATURES, 9 * FEATURES, dtype=torch.int8)
        self.register_buffer("weight", torch.ops.qfx.pack_weight(codes, torch.ones(FEATURES)))
        self.register_buffer("factor", torch.ones(factor))
        self.register_buffer("residual", torch.ones(1, residual, 4, FEATURES))
        self.padding = [1] * padding

    def forward(self, x: Tensor) -> Tensor:
        how = ([3, 3], [1, 1], self.padding, [1, 1], [8, 0, 0, 0, 0], "none", torch.float32)
        layout, beside = [FEATURES, 8, 0, 0, 0], (self.factor, self.residual)
        y: Tensor = torch.ops.qfx.conv_dynamic(x, self.weight, layout, None, *how, *beside)
        return y


@pytest.mark.parametrize(
    "sizes, error",
    [
        ((144, 4, 4), None),
        ((16, 4, 4), "factor has shape 16 but x has K=144"),
        ((144, 3, 4), "residual has shape 1x3x4x16, but the output has shape 1x4x4x16"),
        ((144, 4, 5), "expected 4 numbers of at least 0"),
    ],
    ids=str,
)
def test_operands_that_do_not_fit_reach_the_operator(
    sizes: tuple[int, int, int], error: str | None
) -> None:
    """The function that is called directly would read behind them."""
    f = compiled(Called(*sizes).eval(), inner="inductor")
    with torch.no_grad():
        if error is None:
            assert f(torch.ones(1, FEATURES, 4, 4)).shape == (1, 4, 4, FEATURES)
            return
        with pytest.raises(RuntimeError, match=error):
            f(torch.ones(1, FEATURES, 4, 4))


def linear_call(**changed: Any) -> Callable[[], None]:
    """Returns a call of the function by which generated code runs a linear of 16 features."""
    codes = torch.ones(FEATURES, FEATURES, dtype=torch.int8)
    weight = torch.ops.qfx.pack_weight(codes, torch.ones(FEATURES))
    x, y = torch.ones(1, FEATURES), torch.empty(1, FEATURES)
    numbers = {
        "factor": 0, "rows": 1, "k": FEATURES, "x": 0, "y": 0,
        "code_bits": 8, "symmetric": 1, "per_tensor": 0, "code_group": 0, "rotation": 0,
        "bytes": weight.numel(), "bias": -1, "activation": 0,
        "n": FEATURES, "bits": 8, "group": 0, "scale_group": 0, "shift": 0, "weights": 1,
    } | changed  # fmt: skip
    return lambda: _C.linears(x, weight, *numbers.values(), out=y)


@pytest.mark.parametrize(
    "changed, error",
    [
        ({"k": 32}, "K=32 but the weight was packed for K=16"),
        ({"n": 8}, "N=8 is asked for but the weight was packed for N=16"),
        ({"bytes": 100}, "not a packed weight of this build"),
        ({"shift": 1}, "the layout says 8 bits"),
        ({"code_bits": 9}, "bits=9 is outside 2..8"),
        ({"code_group": 32}, "group=32, but the weight was packed in one group"),
        ({"rotation": 32}, "rotation=32, expected 0, 16 or 64"),
        ({"x": 3}, "unknown dtype"),
        ({"activation": 99}, "unknown activation"),
        ({"bias": 0}, "fewer tensors than announced"),
        ({"weights": 0}, "arguments are missing"),
        ({"weights": 2}, "arguments are missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_direct_calls_check_what_they_know(changed: dict[str, int], error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        linear_call(**changed)()


def test_a_direct_call_refuses_a_damaged_weight() -> None:
    linear_call()()
    codes = torch.ones(FEATURES, FEATURES, dtype=torch.int8)
    damaged = torch.ops.qfx.pack_weight(codes, torch.ones(FEATURES)).clone()
    damaged[-1] ^= 1
    numbers = (0, 1, FEATURES, 0, 0, *Code(), damaged.numel(), -1, 0, *Layout(FEATURES), 1)
    with pytest.raises(RuntimeError, match="its contents are not those that were packed"):
        _C.linears(torch.ones(1, FEATURES), damaged, *numbers, out=torch.ones(1, FEATURES))


def test_cpp_wrapper() -> None:
    """Inductor's wrapper in C++ gives the bits of the one in Python."""
    torch.manual_seed(0)
    model, x = Block(FEATURES).eval(), torch.randn(1, FEATURES)
    with torch.no_grad():
        expected = compiled(model, inner="inductor")(x)
        torch._dynamo.reset()
        y, codes = run_and_get_code(compiled(model, inner="inductor", cpp_wrapper=True), x)
    assert any("aoti_torch" in code and "linear_dynamic" in code for code in codes)
    assert torch.equal(y, expected)
