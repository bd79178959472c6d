"""Conv: a convolution is the linear of its windows, in int8 bit for bit, and has the shape and the
gradients of the float convolution."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qfx
from qfx.graph.views import apply
from qfx.nn.conv_like import ConvViews, kernels_of, matrix_of
from qfx.nn.frozen_conv import of_windows
from qfx.ops.registry import REFERENCES
from qfx.ops.single_tensors import sqnr
from tests.conftest import same_bits
from tests.lib.convolutions import FORMATS, Convolution, convolutions

SCHEMES = ("w8a8", "w8a8-symmetric", "w8a8-tensor", "w8a8-groups", "w8", "w4a8", "w7a7")


@given(convolutions())
def test_windows_are_those_of_the_float_convolution(drawn: Convolution) -> None:
    """With a float weight, whose sums are exact here, also unbatched. In int8 the output has the
    shape and the dtype, and the memory format of the input."""
    module, x = drawn
    conv = qfx.nn.Conv.from_float(module)
    wanted = module(x)
    with torch.no_grad():
        y = conv(x)
    assert (y.shape, y.dtype) == (wanted.shape, wanted.dtype)
    last = FORMATS.get(x.dim(), torch.contiguous_format)
    assert y.is_contiguous(memory_format=torch.contiguous_format if x.is_contiguous() else last)
    with pytest.warns(UserWarning, match="a float weight was assigned"):
        conv.weight = nn.Parameter(module.weight.detach())
    assert torch.equal(conv(x), wanted) and torch.equal(conv(x[0]), module(x[0]))


@given(convolutions())
def test_kernels_are_read_back_from_the_matrix(drawn: Convolution) -> None:
    conv = qfx.nn.Conv.from_float(drawn.module)
    weight = drawn.module.weight.detach()
    matrix = matrix_of(weight, conv.views)
    assert torch.equal(kernels_of(matrix, conv.views.windows.weight, weight.shape), weight)
    assert conv.floats().shape == weight.shape and conv.float_numel == weight.numel()
    assert (conv.out_features, conv.in_features) == matrix.shape == tuple(conv.weight.shape)


@given(convolutions(transposed=False), st.sampled_from(SCHEMES))
def test_int8_is_the_linear_of_the_windows(drawn: Convolution, scheme: str) -> None:
    """Of the windows that the reference of im2col reads, and of kernels that are flattened in
    their order. Patches, which do not overlap, have the channels before the taps."""
    module, x = drawn
    conv, axes = qfx.nn.Conv.from_float(module, scheme), x.dim() - 2
    around = [n for side in _padding(module) for n in side]
    if module.padding_mode != "zeros":
        pairs = [around[2 * i : 2 * i + 2] for i in reversed(range(axes))]
        x = F.pad(x, [n for pair in pairs for n in pair], mode=module.padding_mode)
        around = [0] * len(around)
    rows = REFERENCES["im2col"](x, module.kernel_size, module.stride, around, module.dilation)
    matrix = module.weight.detach().movedim(1, -1).flatten(1)
    if conv.views.window is None:
        rows = rows.unflatten(-1, (-1, x.shape[1])).transpose(-1, -2).flatten(-2)
        matrix = module.weight.detach().flatten(1)
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], dtype=torch.float32)
    linear.weight, linear.bias = nn.Parameter(matrix.contiguous()), module.bias
    with torch.no_grad():
        y = conv(drawn.x)
        wanted = qfx.nn.Linear.from_float(linear, conv.scheme)(rows).movedim(-1, 1)
    assert same_bits(y, wanted)


def _wide_rows(image: Tensor, views: ConvViews) -> Tensor:
    """The windows of a float64 image, which the operator does not take."""
    (name, given), *_ = views.windows.x
    known = REFERENCES["im2col"](image, *given) if name == "im2col" else None
    return apply(views.windows.x, image) if known is None else known


def _padding(module: Any) -> list[tuple[int, int]]:
    if module.padding != "same":
        return [(p, p) for p in module.padding]
    more = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [(n // 2, n - n // 2) for n in more]


@given(convolutions(), st.sampled_from(("w8a8", "w8a8-groups", "w8", "w4a8")))
def test_gradients_are_those_of_the_dequantized_kernels(drawn: Convolution, scheme: str) -> None:
    """The output has the same bits with and without gradients. The gradients are sums in float32,
    in another order: of one output, each of K products is rounded K times at most. Rotated kernels
    of a transposed convolution are not zero where their phases have no tap. (T1)"""
    module, x = drawn
    conv = qfx.nn.Conv.from_float(module, scheme)
    with torch.no_grad():
        plain = conv(x)
    x = x.clone().requires_grad_()
    y = conv(x)
    assert same_bits(y.detach(), plain)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    y.backward(grad)
    matrix, views = conv.quantized.dequantize(torch.float32).double(), conv.views
    wide = x.detach().double().requires_grad_()
    exact = of_windows(
        wide, conv.settings, views, lambda image: F.linear(_wide_rows(image, views), matrix)
    )
    exact.backward(grad.double())
    assert x.grad is not None and wide.grad is not None
    terms = module.out_channels * module.weight[0, 0].numel()
    size = matrix.abs().max() * grad.abs().max() * terms
    bound = 2.0**-24 * (terms + 64) * float(size)  # and of the rotation of K, of 64 sums
    assert (x.grad.double() - wide.grad).abs().max() <= bound
    if conv.bias is not None:
        count = grad.numel() // module.out_channels
        assert conv.bias.grad is not None
        off = (conv.bias.grad.double() - grad.double().transpose(0, 1).flatten(1).sum(1)).abs()
        assert off.max() <= 2.0**-24 * count * count * float(grad.abs().max())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(16, 24, 3, padding=1),
        lambda: nn.Conv2d(16, 24, 1, stride=2),
        lambda: nn.Conv2d(16, 24, 4, stride=4),
        lambda: nn.Conv1d(16, 24, 3, dilation=2, padding="same"),
        lambda: nn.Conv3d(16, 24, 2),
        lambda: nn.ConvTranspose2d(16, 24, 4, stride=2, padding=1),
    ],
    ids=("3x3", "strided", "patches", "dilated", "3-D", "transposed"),
)
def test_a_compiled_float_convolution_has_the_same_bits(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make()).eval()
    x = torch.randn(2, 16, *[8] * len(model[0].kernel_size))  # type: ignore[arg-type]
    config = qfx.Config(minimum_gain=0)
    with torch.no_grad():
        graph, plan = qfx.rewrite(qfx.trace(model, x), config)
        wanted = graph(x)
        assert "xa8r" in str(plan)
        y = qfx.quantize_(model, config)(x)
    assert same_bits(y, wanted) and y.stride() == wanted.stride()


def test_compiled_it_is_one_operator() -> None:
    torch._dynamo.reset()
    model = qfx.quantize_(nn.Sequential(nn.Conv2d(16, 16, 3)))
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(n.target) for n in gm.graph.nodes if "qfx" in str(n.target))
        return gm

    x = torch.randn(1, 16, 6, 6)
    with torch.no_grad():
        y = torch.compile(model[0], backend=backend, fullgraph=True)(x)
    assert seen == ["qfx.conv_dynamic"] and same_bits(y, model[0](x))


def test_it_stays_whole_in_symbolic_traces() -> None:
    model = qfx.quantize_(nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()))
    x = torch.randn(1, 16, 6, 6)
    graph = torch.fx.symbolic_trace(model)
    assert [n.op for n in graph.graph.nodes][1] == "call_module"
    with torch.no_grad():
        assert same_bits(graph(x), model(x)) and same_bits(qfx.trace(model, x)(x), model(x))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_narrow_dtypes_and_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(32, 32, 3, padding=1), torch.randn(2, 32, 9, 9)
    conv = qfx.nn.Conv.from_float(copy.deepcopy(module)).to(dtype)
    assert conv.weight.dtype == dtype and conv.bias.dtype == dtype
    with torch.no_grad():
        y = conv(x.to(dtype))
        assert y.dtype == dtype and sqnr(module(x), y.float()) > 30
        with torch.autocast("cpu", dtype):
            assert qfx.nn.Conv.from_float(module)(x).dtype == dtype


def test_an_empty_batch() -> None:
    conv = qfx.nn.Conv.from_float(nn.Conv2d(16, 8, 3, padding=1))
    with torch.no_grad():
        assert conv(torch.empty(0, 16, 5, 5)).shape == (0, 8, 5, 5)


def test_a_transposed_convolution_takes_an_output_size() -> None:
    module = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1)
    conv, x = qfx.nn.Conv.from_float(module), torch.randn(1, 16, 5, 5)
    with torch.no_grad():
        for size in ([9, 9], [10, 9], [1, 8, 10, 10]):
            assert conv(x, output_size=size).shape == module(x, output_size=size).shape
            assert sqnr(module(x, output_size=size), conv(x, output_size=size)) > 30
        with pytest.raises(ValueError, match=r"\[11, 9\], expected sizes from \[9, 9\] to \[10, "):
            conv(x, output_size=[11, 9])
    plain = qfx.nn.Conv.from_float(nn.Conv2d(16, 8, 3))
    with pytest.raises(ValueError, match="only a transposed convolution has an output_size"):
        plain(x, output_size=[3, 3])


def test_what_is_no_input_is_refused() -> None:
    conv = qfx.nn.Conv.from_float(nn.Conv2d(16, 8, 3))
    with pytest.raises(ValueError, match=r"shape \[16, 5\], expected 2 axes after the channels"):
        conv(torch.ones(16, 5))
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"no window of \[3, 3\] lies in .* \[1, 16, 2, 5\]"):
            conv(torch.ones(1, 16, 2, 5))
        with pytest.raises(RuntimeError, match="K=135"):
            conv(torch.ones(1, 15, 5, 5))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Conv2d(16, 16, 3, groups=16), "a depthwise convolution: each output reads one"),
        (lambda: nn.Conv2d(16, 16, 3, groups=4), "of 4 groups of channels with 4 outputs each"),
        (lambda: nn.ConvTranspose2d(32, 32, 3, groups=2), "a transposed convolution of 2 groups"),
        (lambda: nn.ConvTranspose2d(8, 8, 3, dilation=2), "a dilated transposed convolution"),
        (lambda: nn.ConvTranspose1d(8, 8, 3, 2, padding=3), "more padding than its kernel covers"),
        (lambda: nn.utils.spectral_norm(nn.Conv1d(8, 8, 3)), "spectral_norm computes its weight"),
        (lambda: nn.Linear(8, 8), "Linear is no convolution of torch.nn"),
        (lambda: type("Own", (nn.Conv2d,), {})(8, 8, 3), "Own is no convolution of torch.nn"),
    ],
)
def test_what_is_no_linear_of_windows_is_refused(
    make: Callable[[], nn.Module], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        qfx.nn.Conv.from_float(make())


def test_settings_are_those_of_the_float_module_and_stay() -> None:
    module = nn.Conv2d(16, 8, (3, 1), stride=2, padding=(1, 0), dilation=2, bias=False)
    conv = qfx.nn.Conv.from_float(module)
    for name in (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "padding_mode",
        "dilation", "transposed", "output_padding", "groups",
    ):  # fmt: skip
        assert getattr(conv, name) == getattr(module, name), name
    with pytest.raises(AttributeError, match="stride"):
        conv.stride = (1, 1)
    assert repr(conv) == (
        "Conv(16, 8, kernel_size=(3, 1), stride=(2, 2), padding=(1, 0), dilation=(2, 2), "
        "bias=False, scheme=xs8r_ws8r)"
    )


def test_writes_to_the_weight_are_quantized() -> None:
    torch.manual_seed(0)
    conv = qfx.nn.Conv.from_float(nn.Conv2d(16, 8, 3))
    before = conv.floats()
    with torch.no_grad():
        conv.weight.mul_(2.0)
    assert sqnr(2 * before, conv.floats()) > 40


def test_gradients_reach_what_lies_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(-1, (8, 1)), nn.Conv1d(8, 8, 1))
    qfx.quantize_(model, qfx.Config(skip=["0"]))
    y: Tensor = model(torch.randn(4, 8))
    y.sum().backward()
    weight: Any = model[0].weight
    assert weight.grad is not None and bool((weight.grad != 0).any())
