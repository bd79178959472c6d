"""LSQConv: a convolution with learned steps trains as the linear of its windows, and is served with
the same bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qfx
from qfx.nn import Conv, LSQConv, LSQLinear
from qfx.ops.registry import REFERENCES
from qfx.ops.single_tensors import sqnr
from tests.conftest import same_bits
from tests.lib.convolutions import Convolution, convolutions, laid_out
from tests.lib.resnets import digits, losses_of, resnet

T = qfx.PER_TENSOR
SCHEMES = {
    "rows": qfx.Scheme(),
    "zero points": qfx.Scheme(x=qfx.QSpec(symmetric=False)),
    "learned": qfx.Scheme(x=qfx.QSpec(axes=T), w=qfx.QSpec(axes=T)),
    "learned, 4 bits": qfx.Scheme(x=qfx.QSpec(4, axes=T), w=qfx.QSpec(4)),
    "learned, 5 bits with a zero": qfx.Scheme(x=qfx.QSpec(5, False, T)),
}


def observed(drawn: Convolution, name: str) -> LSQConv:
    module = LSQConv(copy.deepcopy(drawn.module), SCHEMES[name])
    module.observe(drawn.x)
    return module


@given(convolutions(transposed=False), st.sampled_from(sorted(SCHEMES)))
def test_it_trains_as_the_linear_of_its_windows(drawn: Convolution, name: str) -> None:
    """Outputs and gradients of weight, bias and steps to the bit; the windows are those that the
    reference of im2col reads, or of patches, which have the channels before the taps."""
    module, x, conv = *drawn, observed(drawn, name)
    axes = x.dim() - 2
    image = F.pad(x, conv.views.border, mode=module.padding_mode) if conv.views.border else x
    if conv.views.window is None:
        rows, order = _patches(image, module), lambda w: w.flatten(1)
    else:
        rows = REFERENCES["im2col"](image, *conv.views.window)
        order = lambda w: w.movedim(1, -1).flatten(1)  # noqa: E731
    linear = nn.Linear(rows.shape[-1], module.out_channels, module.bias is not None)
    linear.weight = nn.Parameter(order(module.weight.detach()).contiguous())
    linear.bias = None if module.bias is None else nn.Parameter(module.bias.detach())
    wanted = LSQLinear.from_float(linear, SCHEMES[name])
    wanted.observe(rows)
    y, y2 = conv(x), wanted(rows).movedim(-1, 1)
    assert same_bits(y.detach(), y2.detach()) and y.dim() == 2 + axes
    grad = torch.randint(-4, 4, y.shape, generator=torch.Generator().manual_seed(0)).float()
    y.backward(grad), y2.backward(grad)
    assert conv.weight.grad is not None and wanted.weight.grad is not None
    assert conv.weight.grad.shape == module.weight.shape
    assert torch.equal(order(conv.weight.grad), wanted.weight.grad)
    for of in ("bias", "w_log_step", "x_log_step"):
        mine, its = getattr(conv, of), getattr(wanted, of)
        assert (mine is None and its is None) or torch.equal(mine.grad, its.grad), of


def _patches(image: Tensor, module: Any) -> Tensor:
    axes = image.dim() - 2
    for axis, (size, step) in enumerate(zip(module.kernel_size, module.stride, strict=True)):
        image = image.unfold(2 + axis, size, step)
    return image.movedim(1, 1 + axes).flatten(1 + axes)


@given(convolutions(), st.sampled_from(sorted(SCHEMES)), st.booleans())
def test_what_was_trained_is_served_with_the_same_bits(
    drawn: Convolution, name: str, last: bool
) -> None:
    """In eval mode, of every kind of convolution, layout and number of dimensions; the state dict
    holds the float weight in its own shape."""
    conv, x = observed(drawn, name), laid_out(drawn.x, last)
    assert conv.weight.shape == drawn.module.weight.shape
    assert repr(conv).endswith(f"scheme={SCHEMES[name]})")
    model = nn.Sequential(conv)
    with torch.no_grad():
        conv.w_log_step.add_(0.1)  # as if trained
        trained = model(x)  # with the weight packed at the call
        model.eval()
        assert same_bits(model(x), trained)
        again = nn.Sequential(LSQConv(drawn.module, SCHEMES[name])).eval()
        again.load_state_dict(model.state_dict())
        assert same_bits(again(x), trained)
        copied = copy.deepcopy(model)
        assert qfx.convert(model) is model and type(model[0]) is Conv
        assert same_bits(model(x), trained) and model(x).stride() == trained.stride()
        assert same_bits(model(x[0]), copied(x[0]))
        if x.shape[1] * drawn.module.weight[0, 0].numel() > 1:
            assert same_bits(model(x.bfloat16()), copied(x.bfloat16()))


@pytest.mark.parametrize("name", ["rows", "learned"])
def test_a_residual_network_trains_on_digits(name: str) -> None:
    """Batch norms in training mode, residuals and strides. The loss falls as that of float does,
    and the model is served with the bits that it has in eval mode."""
    images, labels = digits()
    of_float = losses_of(resnet(), images, labels, 30)
    model = qfx.prepare_qat(resnet(), images[:64], config=qfx.Config(scheme=SCHEMES[name]))
    losses = losses_of(model, images, labels, 30)
    assert losses[-1] < losses[0] / 2 and of_float[-1] < of_float[0] / 2
    model.eval()
    with torch.no_grad():
        trained = model(images[-200:])
        right = (trained.argmax(1) == labels[-200:]).float().mean()
        assert right > 0.5  # of ten classes
        qfx.convert(model)
        assert [type(m) for m in model.modules() if isinstance(m, nn.Conv2d | LSQConv)] == []
        assert same_bits(model(images[-200:]), trained)


@pytest.mark.parametrize("name", ["rows", "learned"])
@pytest.mark.parametrize("backend", ["aot_eager", "qfx"])
def test_compiled_equals_eager(name: str, backend: str) -> None:
    """Outputs and gradients of every parameter, within float reassociation of the batch norms."""
    torch._dynamo.reset()
    images, _ = digits()
    x = images[:8]
    model = qfx.prepare_qat(resnet(), x, config=qfx.Config(scheme=SCHEMES[name]))
    model.eval()  # batch norms with constant statistics
    options: Any = {"inner": "aot_eager"} if backend == "qfx" else None
    found = []
    for f in (model, torch.compile(model, backend=backend, fullgraph=True, options=options)):
        model.zero_grad()
        y = f(x)
        y.square().sum().backward()
        found.append((y, [p.grad for p in model.parameters()]))
    (y, grads), (y2, grads2) = found
    assert sqnr(y, y2) > 80 and all(g is not None for g in grads)
    for g, g2 in zip(grads, grads2, strict=True):
        assert torch.allclose(g, g2, rtol=1e-3, atol=1e-4 * float(g.abs().amax()))


def test_gradients_can_be_int8() -> None:
    """Stochastic rounding is unbiased: the mean of many is near the float gradient."""
    torch.manual_seed(0)
    module, x = nn.Conv2d(8, 8, 3, padding=1), torch.randn(2, 8, 6, 6)
    exact = LSQConv(copy.deepcopy(module))
    exact(x).square().sum().backward()
    conv, count = LSQConv(module, qfx.Scheme(backward="int8")), 16
    for _ in range(count):
        conv(x).square().sum().backward()
    assert exact.weight.grad is not None and conv.weight.grad is not None
    assert sqnr(exact.weight.grad, conv.weight.grad / count) > 20
    assert not torch.equal(conv.weight.grad / count, exact.weight.grad)


def test_casts_and_autocast_leave_the_steps_in_float32() -> None:
    images, _ = digits()
    model = qfx.prepare_qat(resnet(), images[:8], config=qfx.Config(scheme=SCHEMES["learned"]))
    model.eval()
    wanted = model(images[:8])
    with torch.autocast("cpu", torch.bfloat16):
        y = model(images[:8])
        assert y.dtype == torch.bfloat16 and sqnr(wanted, y.float()) > 15
    model.bfloat16()
    steps = {p.dtype for n, p in model.named_parameters() if n.endswith("log_step")}
    assert steps == {torch.float32} and sqnr(wanted, model(images[:8].bfloat16()).float()) > 15


def test_a_prepared_model_is_pickled_and_named_by_explain() -> None:
    images, _ = digits()
    model = qfx.prepare_qat(resnet(), config=qfx.Config(scheme=qfx.Scheme())).eval()
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    again = torch.load(kept, weights_only=False)
    with torch.no_grad():
        assert same_bits(again(images[:4]), model(images[:4]))
        report = qfx.explain(model, images[:4])
    assert {row.reason for row in report.rows} == {
        "an int8 module, qfx.nn.LSQConv",
        "an int8 module, qfx.nn.LSQLinear",
    }


class Mixed(nn.Module):
    """A convolution that is taken, and two modules that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.apart = nn.Conv1d(8, 8, 3), nn.Conv1d(8, 8, 3, groups=8)
        self.rnn = nn.LSTM(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.apart(x) * 0 + self.taken(x))[0]  # type: ignore[no-any-return]


def test_what_stays_float_says_so() -> None:
    model, scheme = Mixed(), SCHEMES["learned"]
    phrase = r"1 of 4 .* stay float .*rnn.hh_l0 \(xs8t_ws8t has one scale for all rows of the state"
    with pytest.warns(UserWarning, match=phrase):
        qfx.prepare_qat(model, torch.randn(2, 8, 9), config=qfx.Config(scheme=scheme))
    assert type(model.taken) is LSQConv and type(model.apart) is nn.Conv1d
    assert type(model.rnn) is nn.LSTM


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "groups": (
        lambda: LSQConv(nn.Conv2d(8, 8, 3, groups=2)),
        "of 2 groups of channels with 4 outputs each",
    ),
    "linear": (lambda: LSQConv(nn.Linear(8, 8)), "LSQConv: Linear is no convolution of torch.nn"),
    "rotation": (
        lambda: LSQConv(nn.Conv2d(8, 8, 3), qfx.Scheme(rotation=64)),
        "LSQConv: the scheme xs8r_ws8r_h64 is for graphs",
    ),
    "never fitted": (
        lambda: qfx.convert(nn.Sequential(LSQConv(nn.Conv2d(8, 8, 3), SCHEMES["learned"]))),
        "0: its x_log_step is NaN: it was not fitted to data",
    ),
    "an attribute": (
        lambda: qfx.convert(nn.Sequential(_named("codes"))),
        "its attribute 'codes' would hide that of the module in its place",
    ),
    "another scheme": (
        lambda: LSQConv(nn.Conv2d(8, 8, 3)).load_state_dict(
            LSQConv(nn.Conv2d(8, 8, 3), qfx.Scheme(w=qfx.QSpec(4))).state_dict()
        ),
        r"scheme says w.bits=4 instead of 8",
    ),
    "a linear's state": (
        lambda: LSQConv(nn.Conv2d(8, 8, 1)).load_state_dict(LSQLinear(8, 8).state_dict()),
        "scheme is that of a LSQLinear, not of a LSQConv",
    ),
}


def _named(name: str) -> LSQConv:
    made = LSQConv(nn.Conv2d(8, 8, 3))
    setattr(made, name, 1)
    return made


@pytest.mark.parametrize("row", ODD)
def test_errors(row: str) -> None:
    call, sentence = ODD[row]
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        call()


@pytest.mark.parametrize("how", [qfx.quantize_, qfx.prepare_qat])
def test_an_attribute_that_would_hide_one_of_the_new_module_is_refused(how: Any) -> None:
    """`settings` is one of convolutions only: a linear may have it."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 8))
    model[2].settings = 1  # type: ignore[assignment]
    how(copy.deepcopy(model))
    model[0].settings = 1  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"1 of 2 .*\n  0: its attribute 'settings' would hide"):
        how(model)
    assert type(model[0]) is nn.Conv2d
