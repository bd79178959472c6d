"""Convolutions of several groups of channels: each is a convolution of its own, bit for bit."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qfx
from qfx.nn import Conv, LSQConv
from qfx.ops.single_tensors import sqnr
from tests.conftest import same_bits
from tests.lib.convolutions import PLAIN, laid_out

SCHEMES = ("w8a8", "w8a8-symmetric", "w8a8-tensor", "w8a8-groups", "w8", "w4a8", "w7a7")
Drawn = tuple[Any, Tensor]


@st.composite
def grouped(draw: Any) -> Drawn:
    """Draws a convolution of 2 to 4 groups with 8 to 17 outputs each, and an image."""
    axes, groups = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    each = lambda *of: tuple(draw(st.sampled_from(of)) for _ in range(axes))  # noqa: E731
    channels, outputs = draw(st.sampled_from((2, 8, 32))), draw(st.sampled_from((8, 9, 17)))
    kernel, padding = each(2, 3), each(0, 1)
    module = PLAIN[axes - 1](
        groups * channels, groups * outputs, kernel, each(1, 2), padding, 1, groups,
        draw(st.booleans()), draw(st.sampled_from(("zeros", "circular"))),
    )  # fmt: skip
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g)
    x = torch.randn((2, groups * channels, *each(4, 5)), generator=g)
    return module, laid_out(x, draw(st.booleans()))


def parts(module: Any, x: Tensor) -> list[Drawn]:
    """The groups of a convolution, each with its channels of x. A window of one element of each
    group would be read in another order if it were a convolution of its own."""
    found, count = [], module.groups
    biases = [None] * count if module.bias is None else module.bias.detach().chunk(count)
    each = zip(module.weight.detach().chunk(count), biases, x.chunk(count, 1), strict=True)
    for weight, bias, channels in each:
        part = type(module)(
            weight.shape[1], weight.shape[0], module.kernel_size, module.stride, module.padding,
            1, 1, bias is not None, module.padding_mode,
        )  # fmt: skip
        part.weight = nn.Parameter(weight.clone())
        part.bias = None if bias is None else nn.Parameter(bias.clone())
        found.append((part, channels.contiguous()))
    return found


def is_patch(module: Any) -> bool:
    no_zeros = module.padding_mode != "zeros" or not any(module.padding)
    return module.kernel_size == module.stride and no_zeros


@given(grouped(), st.sampled_from(SCHEMES))
def test_a_group_is_a_convolution_of_its_own(drawn: Drawn, scheme: str) -> None:
    """In int8 and, after its weight is a float one, in float; with and without gradients."""
    module, x = drawn
    conv = Conv.from_float(copy.deepcopy(module), scheme)
    assert conv.floats().shape == module.weight.shape
    assert conv.groups == module.groups and f"groups={module.groups}" in repr(conv)
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        y = conv(x)
    trained = conv(leaf)
    assert same_bits(trained.detach(), y) and y.shape == module(x).shape
    if not is_patch(module):  # of which a group alone has the channels before the taps
        each = [(Conv.from_float(part, scheme), its) for part, its in parts(module, x)]
        with torch.no_grad():
            wanted = torch.cat([part(its) for part, its in each], 1)
        assert same_bits(wanted, y)
        grad = torch.ones_like(y)
        trained.backward(grad)
        its_leaves = [its.clone().requires_grad_() for _, its in each]
        for (part, _), its in zip(each, its_leaves, strict=True):
            part(its).backward(torch.ones_like(part(its)))
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.cat([t.grad for t in its_leaves], 1))  # type: ignore
    floats = torch.func.functional_call(conv, {"weight": module.weight.detach()}, (x,))
    assert sqnr(module(x).detach(), floats.detach()) > 100


@given(grouped(), st.sampled_from((qfx.PER_ROW, qfx.PER_TENSOR)), st.booleans())
def test_groups_train_and_are_served(drawn: Drawn, axes: tuple[int, ...], of_tensor: bool) -> None:
    """With a step for each output, or one for all groups; each group trains as alone."""
    module, x = drawn
    scheme = qfx.Scheme(
        x=qfx.QSpec(axes=qfx.PER_TENSOR if of_tensor else qfx.PER_ROW), w=qfx.QSpec(axes=axes)
    )
    model = nn.Sequential(LSQConv(copy.deepcopy(module), scheme))
    model[0].observe(x)  # type: ignore[operator]
    y = model(x)
    y.backward(torch.ones_like(y))
    assert model[0].weight.grad.shape == module.weight.shape  # type: ignore[union-attr]
    if axes == qfx.PER_ROW and not of_tensor and not is_patch(module):
        each = [(LSQConv(part, scheme), its) for part, its in parts(module, x)]
        for part, its in each:
            part(its).backward(torch.ones_like(part(its)))
        for name in ("weight", "w_log_step"):
            found = torch.cat([getattr(part, name).grad for part, _ in each])
            assert torch.equal(getattr(model[0], name).grad, found)
    with torch.no_grad():
        assert same_bits(model.eval()(x), y.detach())
        qfx.convert(model)
        assert type(model[0]) is Conv and same_bits(model(x), y.detach())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.grouped = nn.Conv2d(32, 64, 3, padding=1, groups=4)
        self.few = nn.Conv2d(64, 64, 3, padding=1, groups=16)
        self.apart = nn.Conv2d(64, 64, 3, padding=1, groups=64)

    def forward(self, x: Tensor) -> Tensor:
        return self.apart(self.few(self.grouped(x)))  # type: ignore[no-any-return]


X = torch.randn(2, 32, 9, 9, generator=torch.Generator().manual_seed(0))


def test_quantize_counts_what_stays_float(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qfx")
    model = qfx.quantize_(Net())
    assert [type(m) for m in model.children()] == [Conv, nn.Conv2d, nn.Conv2d]
    assert "quantize_: 1 of 3 linears and convolutions replaced" in caplog.text
    assert "of 16 groups of channels with 4 outputs each, fewer than 8" in caplog.text
    assert "a depthwise convolution: each output reads one channel" in caplog.text
    prepared = qfx.prepare_qat(Net())
    assert [type(m) for m in prepared.children()] == [LSQConv, nn.Conv2d, nn.Conv2d]


def test_copies_files_and_writes(tmp_path: Path) -> None:
    model = qfx.quantize_(Net().eval())
    with torch.no_grad():
        y = model(X)
        qfx.save(model, tmp_path)
        loaded = [qfx.load(tmp_path, Net().eval()), pickle.loads(pickle.dumps(model))]
        loaded += [copy.deepcopy(model), qfx.quantize_(Net().eval())]
        loaded[-1].load_state_dict(model.state_dict())
        assert all(same_bits(m(X), y) for m in loaded)
        inside = model.grouped(X)
        model.grouped.weight.mul_(2)  # the weights of the groups are cut again
        bias = model.grouped.bias.view(-1, 1, 1)
        assert sqnr(2 * (inside - bias), model.grouped(X) - bias) > 35
        model.grouped.load_state_dict(Net().grouped.state_dict())
        assert same_bits(model(X), y)


@pytest.mark.filterwarnings("error:Dynamo detected a call to a")
def test_compiled_and_exported() -> None:
    torch._dynamo.reset()
    model = qfx.quantize_(Net().eval())
    with torch.no_grad():
        y = model.grouped(X)
        compiled = torch.compile(model.grouped, backend="aot_eager", fullgraph=True)
        assert same_bits(compiled(X), y)
        program = torch.export.export(model.grouped, (X,))
        assert same_bits(program.module()(X), y)
        called = [str(n.target) for n in program.graph.nodes]
        assert called.count("qfx.conv_dynamic.default") == 1


def test_traces_and_function_transforms() -> None:
    """A trace computes shapes without values, of which nothing may be kept."""
    model = qfx.quantize_(nn.Sequential(Net().grouped).eval())
    prepared = qfx.prepare_qat(nn.Sequential(Net().grouped).eval())
    for net in (model, prepared):
        traced = qfx.trace(net, X)
        with torch.no_grad():
            assert same_bits(traced(X), net(X))
    with torch.no_grad():
        each = torch.func.vmap(lambda x: model(x[None])[0])(X)
    assert same_bits(each, model(X).detach())


def test_explain_measures_it() -> None:
    model = nn.Sequential(Net().grouped).eval()
    reference = copy.deepcopy(model)
    report = qfx.explain(qfx.quantize_(model), X, reference=reference)
    (row,) = report.rows
    assert row.reason == "an int8 module, qfx.nn.Conv" and row.shape == "162x72x64"
    assert row.sqnr_db is not None and row.sqnr_db > 30
