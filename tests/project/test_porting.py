"""docs/porting.md: its snippets run one by one; and every mistake of the replaced systems that it
names is shown, in a few lines of their formula, beside the right value and ours."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.nn.binary import binary_linear
from qfx.nn.functional import lsq_linear, scaled_gradient

PAGE = Path(__file__).resolve().parents[2] / "docs/porting.md"
SNIPPETS = re.findall(r"^## (.*?)$|^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
ops = torch.ops.qfx


def _snippets() -> dict[str, str]:
    found, section = {}, ""
    for title, code in SNIPPETS:
        section = title or section
        if code:
            found[f"{section} {sum(k.startswith(section) for k in found)}"] = code
    return found


@pytest.mark.parametrize("name", _snippets())
def test_snippet_runs_by_itself(name: str) -> None:
    exec(compile(_snippets()[name], f"{PAGE}: {name}", "exec"), {"__name__": "__main__"})


def test_every_system_has_a_snippet() -> None:
    assert {name.partition(" ")[0] for name in _snippets()} >= {"1.", "2.", "3.", "4.", "5."}


class Shown(NamedTuple):
    """`right` is what the definition gives; `off`: how far ours may be, from roundings alone."""

    theirs: Any
    ours: Any
    right: Any
    off: float = 0.0


MISTAKES: dict[str, Callable[[], Shown]] = {}


def mistake(name: str) -> Callable[[Callable[[], Shown]], None]:
    def add(show: Callable[[], Shown]) -> None:
        assert name not in MISTAKES
        MISTAKES[name] = show

    return add


def _agree(a: Any, right: Any, off: float) -> bool:
    if not isinstance(right, Tensor) or not isinstance(a, Tensor):
        return bool(a == right)
    if a.shape != right.shape:
        return False
    return bool(((a.double() - right.double()).abs() <= off).all())


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the name of the error it raises."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


G = torch.Generator().manual_seed(0)
X, W = torch.randn(6, 64, generator=G), torch.randn(32, 64, generator=G)
GRAD = torch.randn(6, 32, generator=G)


# --- 1. the quantizer notebook ---


@mistake("1 in-place quantizers destroy the weights")
def _() -> Shown:
    theirs, ours = W.clone(), W.clone()
    scale = theirs.abs().amax(1, keepdim=True).clamp_(min=1e-5).div_(127)
    theirs.div_(scale).round_().mul_(scale)  # what the caller gets, and what is left to the caller
    qfx.quantize(ours)
    return Shown(theirs, ours, W)


@mistake("1 per column raises NameError")
def _() -> Shown:
    def theirs() -> Tensor:
        scales = W.abs().amax(0, keepdim=True) / 127
        return (W / scale).round() * scales  # noqa: F821

    scale_k = W.abs().amax(0) / 127
    right = (W / scale_k).round() * scale_k
    ours = qfx.dequantize(qfx.quantize(W, qfx.QSpec(axes=qfx.PER_COLUMN)))
    return Shown(outcome(theirs), ours, right, 1e-6)


@mistake("1 zero points leave the grid for a range without zero")
def _() -> Shown:
    x = torch.linspace(5, 6, 64)[None]
    scale = (x.max() - x.min()) / 255
    theirs = (0 - (x.min() / scale).round()).reshape(1, 1)  # -1275, of 8 bits
    quantized = qfx.quantize(x, qfx.QSpec(symmetric=False))
    inside = quantized.zero_point.clamp(-128, 127)
    return Shown(theirs.int(), quantized.zero_point, inside)


@mistake("1 asymmetric codes are not clamped")
def _() -> Shown:
    x = torch.tensor([[-1.5, 0.0, 253.5]])  # a step of 1: zero point 2, codes up to 254 + 2
    zero = -(x.min().round())
    theirs = (x.round() + zero).to(torch.uint8) - zero
    return Shown(theirs, qfx.dequantize(qfx.quantize(x, qfx.QSpec(symmetric=False))), x, 0.5)


# --- 2. quanto ---


def _static(x: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """(dx, ds) of ours through a learned or static step, for GRAD."""
    leaf, s = x.clone().requires_grad_(), torch.tensor([step], requires_grad=True)
    scheme = qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR))
    w_step = (W.abs().amax(1, keepdim=True) / 127).detach()
    lsq_linear(leaf, W, None, s, w_step, scheme).backward(GRAD)
    assert leaf.grad is not None and s.grad is not None
    return leaf.grad, s.grad


def _w_hat(axes: tuple[int, ...] = qfx.PER_ROW) -> Tensor:
    return qfx.dequantize(qfx.quantize(W, qfx.QSpec(axes=axes)))


@mistake("2 no clip mask: inputs out of range get a gradient")
def _() -> Shown:
    step = 0.6 / 127  # 55 % of a normal input are beyond it
    clipped = (X.abs() > 0.6).double().mean()
    theirs = GRAD @ _w_hat()
    return Shown(
        (theirs == 0).double().mean(), (_static(X, step)[0] == 0).double().mean(), clipped, 1e-3
    )


@mistake("2 scales get no gradient")
def _() -> Shown:
    step = 0.6 / 127
    a, v = (GRAD @ _w_hat()).double(), X.double() / step
    inside = v.abs() <= 127
    right = (a * (v.round().clamp(-127, 127) - torch.where(inside, v, 0.0))).sum().reshape(1)
    return Shown(None, _static(X, step)[1], right, 1e-3 * float(right.abs()))


@mistake("2 a gradient that is not contiguous raises")
def _() -> Shown:
    x = X.reshape(2, 3, 64)
    grad = torch.randn(2, 32, 3, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    theirs = outcome(lambda: (grad.view(-1, 32) @ W).reshape(x.shape))
    leaf = x.clone().requires_grad_()
    module = _frozen()
    module(leaf).backward(grad)
    return Shown(theirs, leaf.grad, grad @ module.weight, 1e-4)


@mistake("2 the momentum of calibration is ignored")
def _() -> Shown:
    """Theirs is a moving average of 0.9 whatever is asked for; ours has no hidden average."""
    sizes = [1.0, 2.0, 4.0]

    def theirs(momentum: float) -> float:
        scale = sizes[0]
        for size in sizes[1:]:
            scale = 0.9 * scale + 0.1 * size  # not `momentum`
        return scale

    module = qfx.nn.LSQLinear(4, 4, scheme=qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR)))
    assert module.x_log_step is not None
    for size in sizes:
        module.observe(torch.full((1, 4), size))
    ours = float(module.x_log_step.exp().detach()) * 127
    return Shown(theirs(0.0), round(ours, 3), 4.0)  # momentum 0: the last batch


@mistake("2 few tokens and odd sizes leave the integer path")
def _() -> Shown:
    def theirs(tokens: int, k: int, n: int) -> bool:
        return tokens > 16 and tokens % 8 == 0 and k % 8 == 0 and n % 8 == 0

    x, w = torch.randint(-128, 128, (3, 13)), torch.randint(-128, 128, (5, 13))
    packed = ops.pack_weight(w.to(torch.int8), torch.ones(5))
    got = ops.int8_mm(x.to(torch.int8), torch.zeros(3, 1, dtype=torch.int32), packed, 5)
    return Shown(theirs(3, 13, 5), torch.equal(got.long(), x @ w.t()), True)


# --- 3. PyTorch's packed dynamic linear ---


def _frozen(axes: tuple[int, ...] = qfx.PER_ROW) -> qfx.nn.Linear:
    linear = nn.Linear(64, 32, bias=False)
    linear.weight.data = W.clone()
    return qfx.nn.Linear.from_float(linear, qfx.Scheme(w=qfx.QSpec(axes=axes)))


def _dx(module: nn.Module, grad: Tensor) -> Tensor:
    x = X.clone().requires_grad_()
    module(x).backward(grad)
    assert x.grad is not None
    return x.grad


@mistake("3 the caller's gradient is multiplied in place")
def _() -> Shown:
    theirs, ours = GRAD.clone(), GRAD.clone()
    theirs.mul_(0.01)  # grad_output0 * input_scale, in place
    _dx(_frozen(qfx.PER_TENSOR), ours)
    return Shown(theirs, ours, GRAD)


@mistake("3 per tensor, the weight is transposed once too often")
def _() -> Shown:
    module = _frozen(qfx.PER_TENSOR)
    theirs = outcome(lambda: GRAD @ module.weight.t())
    return Shown(theirs, _dx(module, GRAD), GRAD @ module.weight, 1e-4)


@mistake("3 a factor of the input's scale")
def _() -> Shown:
    module, input_scale = _frozen(), float(X.abs().max() / 127)
    theirs = (GRAD @ module.weight) * input_scale
    return Shown(theirs, _dx(module, GRAD), GRAD @ module.weight, 1e-4)


@mistake("3 in today's wheels there is no gradient at all")
def _() -> Shown:
    x = X.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.nn.quantized.dynamic.Linear(64, 32)(x).backward(GRAD)
    module = _frozen()
    return Shown(x.grad, _dx(module, GRAD), GRAD @ module.weight, 1e-4)


@mistake("3 sums saturate in 16 bits")
def _() -> Shown:
    """maddubs adds two products of unsigned and signed bytes and saturates: 255 * 127 * 2."""
    k = 1023
    q_x, q_w = torch.full((k + 1,), 255), torch.full((k + 1,), 127)
    q_x[k] = 0
    pairs = (q_x * q_w).reshape(-1, 2).sum(1).clamp(-(2**15), 2**15 - 1)
    theirs = (pairs.sum() / 255 / 127).round().reshape(1, 1)
    linear = nn.Linear(k, 1, bias=False)
    nn.init.ones_(linear.weight)
    with torch.no_grad():
        ours = qfx.nn.Linear.from_float(linear)(torch.ones(1, k))
    return Shown(theirs, ours, torch.full((1, 1), 1023.0), 1e-3)


# --- 4. Q8Linear ---


class Learned(NamedTuple):
    a: Tensor  # G w^, the gradient of x^
    v: Tensor  # x / s
    step: float

    @property
    def inside(self) -> Tensor:
        return self.v.abs() <= 127


def _learned(step: float = 0.01) -> Learned:
    return Learned((GRAD @ _w_hat()).double(), X.double() / step, step)


@mistake("4 dx has an extra factor of the scale")
def _() -> Shown:
    d = _learned()
    return Shown(d.a * d.inside * d.step, _static(X, d.step)[0], d.a * d.inside, 1e-4)


@mistake("4 the scale's gradient loses its clipping terms")
def _() -> Shown:
    """dx, masked already, stands where the gradient of x^ belongs."""
    d = _learned()
    terms = d.v.round().clamp(-127, 127) - torch.where(d.inside, d.v, 0.0)
    right = (terms * d.a).sum().reshape(1)
    theirs = (terms * (d.a * d.inside * d.step)).sum().reshape(1)
    assert abs(theirs) < 0.01 * abs(right)
    return Shown(theirs, _static(X, d.step)[1], right, 1e-4 * float(right.abs()))


@mistake("4 the gradient's factor depends on the batch")
def _() -> Shown:
    """1 / sqrt(numel 127): half as much for four times the tokens of the same mean gradient."""
    factors = [(x.numel() * 127) ** -0.5 for x in (X, X.repeat(4, 1))]
    step = torch.ones(1, requires_grad=True)
    found = []
    for _x in (X, X.repeat(4, 1)):  # ours takes the features alone
        step.grad = None
        scaled_gradient(step, _x.shape[1], 8).sum().backward()
        assert step.grad is not None
        found.append(float(step.grad))
    return Shown(factors[0] / factors[1], found[0] / found[1], 1.0)


@mistake("4 scales from the mean use a quarter of the codes")
def _() -> Shown:
    """4.1 % error against 0.7 % for the greatest value of each row, on normal weights."""
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    scale = 2 * w.abs().mean() / 127**0.5
    codes = (w / scale).round().clamp(-128, 127)
    theirs = (codes * scale - w).norm() / w.norm()
    ours = qfx.quantization_error(w)[0] / w.norm()
    assert codes.abs().max() <= 40 and 0.03 < theirs < 0.05
    return Shown(bool(theirs < 0.01), bool(ours < 0.01), True)


@mistake("4 stored int8 weights go stale over eval, train, eval")
def _() -> Shown:
    module = qfx.nn.LSQLinear(64, 32, bias=False).eval()
    with torch.no_grad():
        stored = module(X)  # theirs: q_w is kept from the first eval on
        module.train()
        module.weight.mul_(-1)
        module.eval()
        right = qfx.nn.functional.lsq_linear(
            X, module.weight, None, None, module.w_log_step.exp(), module.scheme
        )
        return Shown(stored, module(X), right)


@mistake("4 inputs have two dimensions")
def _() -> Shown:
    x = X.reshape(2, 3, 64)
    theirs = outcome(lambda: torch._int_mm(x.to(torch.int8), W.to(torch.int8).t()))
    module = qfx.nn.LSQLinear(64, 32, bias=False)
    return Shown(theirs, module(x).detach(), module(X).detach().reshape(2, 3, 32))


@mistake("4 .item() breaks the graph")
def _() -> Shown:
    def theirs(x: Tensor, scale: Tensor) -> Tensor:
        return x / (scale.item() if scale.item() > 0 else 1.0)

    module = qfx.nn.LSQLinear(64, 32, scheme=qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR)))
    module.observe(X)
    whole = [
        outcome(lambda f=f, a=a: torch.compile(f, backend="eager", fullgraph=True)(*a) is not None)
        for f, a in ((theirs, (X, torch.ones(1))), (module, (X,)))
    ]
    return Shown(whole[0], whole[1], True)


@mistake("4 nv_tensor_quant takes the signed maximum")
def _() -> Shown:
    x = -X.abs() - 1

    def theirs(x: Tensor) -> Tensor:
        scale = 127 / x.max()  # of negative numbers
        return (x * scale).round().clamp(-127, 127) / scale

    near = lambda values: bool(((values - x).abs() <= x.abs().max() / 127).all())  # noqa: E731
    return Shown(near(theirs(x)), near(qfx.dequantize(qfx.quantize(x))), True)


@mistake("4 nv_tensor_quant gives NaN for zeros")
def _() -> Shown:
    x = torch.zeros(2, 3)
    theirs = (x * (127 / x.max())).round() / (127 / x.max())
    return Shown(theirs, qfx.dequantize(qfx.quantize(x)), x)


# --- 5. BinaryLinear ---


def _signs(v: Tensor) -> Tensor:
    return torch.where(v >= 0, 1.0, -1.0).double()


class Binary(NamedTuple):
    dx: Tensor
    dw: Tensor
    ds: Tensor


SMALL = 0.5 * W / W.abs().max()  # within the clip of weights
S = 0.7


def _binary(x: Tensor = X, dtype: torch.dtype = torch.float32) -> Binary:
    leaves = [t.clone().requires_grad_() for t in (x, SMALL, torch.tensor([S]))]
    binary_linear(leaves[0], leaves[1], None, leaves[2]).backward(GRAD[: len(x)])
    return Binary(*(t.grad for t in leaves))  # type: ignore[arg-type]


def _a(x: Tensor = X) -> Tensor:
    """G (sign(W) s_w), in float64."""
    w_hat = _signs(SMALL) * SMALL.double().abs().mean(1, keepdim=True)
    return GRAD[: len(x)].double() @ w_hat


@mistake("5 the scale's gradient loses clipped elements")
def _() -> Shown:
    masked = _a() * (X.abs() <= S)
    theirs, right = (masked * X.sign()).sum(), (_a() * _signs(X)).sum()
    return Shown(theirs.reshape(1), _binary().ds, right.reshape(1), 1e-4)


@mistake("5 sign(0) is +1 forward and 0 backward")
def _() -> Shown:
    x = torch.zeros(6, 64)
    theirs = (_a() * x.sign()).sum().reshape(1)
    return Shown(theirs, _binary(x).ds, _a().sum().reshape(1), 1e-4)


@mistake("5 the sum of signs is rounded to bfloat16 before it is scaled")
def _() -> Shown:
    """Odd sums beyond 256 lie between two bfloat16 numbers."""
    k = 1023
    x, w = torch.ones(1, k), torch.ones(2, k)
    w[1, :150] = -1
    right = _signs(x) @ _signs(w).t()
    packed = ops.binary_pack(w)
    exact = ops.binary_linear(x.bfloat16(), packed, torch.ones(2), None, "none", torch.float32)
    return Shown(right.bfloat16(), exact, right)


@mistake("5 dW goes through a quantizer that drops its scale")
def _() -> Shown:
    right = GRAD.double().t() @ (_signs(X) * S)
    scale = right.abs().amax() / 127
    return Shown((right / scale).round(), _binary().dw, right, 1e-4)


@mistake("5 kernels for three GPUs and K in multiples of 8, elsewhere the process exits")
def _() -> Shown:
    def theirs(device: str, k: int) -> bool:
        return device in {"rtx3090", "a100", "rtx4090"} and k % 8 == 0

    x, w = torch.randn(3, 2, 13, generator=G), torch.randn(5, 13, generator=G)
    got = ops.binary_mm(x, ops.binary_pack(w), 5)
    return Shown(theirs("cpu", 13), torch.equal(got.double(), _signs(x) @ _signs(w).t()), True)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_and_right_value(name: str) -> None:
    """Ours is right to its roundings; theirs is not."""
    shown = MISTAKES[name]()
    assert _agree(shown.ours, shown.right, shown.off)
    assert not _agree(shown.theirs, shown.right, shown.off)


def test_the_page_names_every_mistake() -> None:
    """The tables of what is wrong have the rows of their system, in their order."""
    sections = re.findall(r"^## (\d)\.(.*?)(?=^## )", PAGE.read_text(), re.M | re.S)
    listed = [
        f"{number} {row}"
        for number, text in sections
        for row in re.findall(r"^\| (.+?) \| ", text.split("| wrong there | here |")[1], re.M)
    ]
    assert listed == list(MISTAKES)
