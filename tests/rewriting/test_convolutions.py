"""Convolutions in compiled graphs: batch norms and computed weights are folded, layouts are kept,
and what a user reads has the strides of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

import qfx
from qfx.graph.patterns import calls
from qfx.ops.single_tensors import sqnr

ops, aten = torch.ops.qfx, torch.ops.aten
C = 32


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"minimum_gain": 0, "inner": "eager", **options}
    return torch.compile(model, backend="qfx", options=options)


class Net(nn.Module):
    """Modules one after the other, and a function of the last result."""

    def __init__(self, *modules: nn.Module, end: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.modules_in_order, self.end = nn.Sequential(*modules), end
        g = torch.Generator().manual_seed(0)
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
                norm.running_mean.normal_(generator=g)  # type: ignore[union-attr]
                norm.running_var.uniform_(0.5, 2, generator=g)  # type: ignore[union-attr]
                if norm.affine:
                    norm.weight.data.uniform_(0.5, 2, generator=g)
                    norm.bias.data.normal_(generator=g)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.end(self.modules_in_order(x))


def conv(**how: Any) -> nn.Conv2d:
    return nn.Conv2d(C, C, 3, padding=1, **how)


def rewritten(model: nn.Module, x: Tensor) -> fx.GraphModule:
    gm = torch.export.export(model, (x,)).module()
    made, _ = qfx.rewrite(gm, qfx.Config(minimum_gain=0))
    return made


def called(gm: fx.GraphModule) -> list[str]:
    names = (
        str(getattr(n.target, "__name__", n.target))
        for n in gm.graph.nodes
        if n.op == "call_function"
    )
    return [name.partition(".")[0] for name in names]


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv, norm, relu": (lambda: Net(conv(), nn.BatchNorm2d(C), nn.ReLU()), (2, C, 6, 5)),
    "no bias": (lambda: Net(conv(bias=False), nn.BatchNorm2d(C)), (2, C, 6, 5)),
    "not affine": (lambda: Net(conv(), nn.BatchNorm2d(C, affine=False)), (2, C, 6, 5)),
    "1x1": (lambda: Net(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C)), (2, C, 6, 5)),
    "1-d": (lambda: Net(nn.Conv1d(C, 8, 3), nn.BatchNorm1d(8)), (2, C, 9)),
    "transposed": (
        lambda: Net(nn.ConvTranspose1d(C, 8, 4, 2, 1), nn.BatchNorm1d(8), nn.ReLU()), (2, C, 9),
    ),
    "linear": (lambda: Net(nn.Linear(C, 8), nn.BatchNorm1d(8)), (5, C)),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_a_batch_norm_becomes_part_of_weight_and_bias(name: str) -> None:
    make, shape = NORMS[name]
    model, x = make(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    gm = rewritten(model, x)
    assert not {"batch_norm", "relu", "rsqrt", "mul"} & {*called(gm)}, called(gm)
    with torch.no_grad():
        wanted = model(x)
        assert sqnr(wanted, gm(x)) > 30 and sqnr(wanted, compiled(model)(x)) > 30


NOT_FOLDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "channels of a linear are its second axis": (
        lambda: Net(nn.Linear(C, 8), nn.BatchNorm1d(5)), (2, 5, C),
    ),
    "its result is read twice": (
        lambda: Net(conv(), end=lambda y: F.batch_norm(y, y.new_zeros(C), y.new_ones(C)) + y),
        (2, C, 4, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_other_norms_stay(name: str) -> None:
    make, shape = NOT_FOLDED[name]
    model, x = make(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert 25 < sqnr(model(x), compiled(model)(x)) < 70


def test_a_norm_stays_where_a_recipe_or_a_guard_is_of_the_weight_without_it() -> None:
    """What follows reads the activation after the norm, and not the convolution."""
    model = Net(conv(), nn.BatchNorm2d(C), nn.ReLU(), nn.Conv2d(C, C, 2, stride=2))
    x = torch.randn(2, C, 6, 6)
    recipe = qfx.calibrate(model, [x], qfx.Config(minimum_gain=0), progress=False)
    assert [site.scheme is not None for site in recipe.sites] == [True, True]
    with torch.no_grad():
        for options in ({"recipe": recipe}, {"guard": 0.5}):
            assert 30 < sqnr(model(x), compiled(model, **options)(x)) < 70


def test_groups_have_no_guard() -> None:
    report = qfx.explain(
        Net(conv(groups=2)), torch.randn(1, C, 4, 4), options={"guard": 0.5, "minimum_gain": 0}
    )
    assert "not guarded: its rows are multiplied by several weights" in report.rows[0].reason


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Conv1d(C, 8, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Conv1d(C, 8, 3)),
    "of a linear": lambda: nn.Sequential(
        nn.Flatten(), parametrizations.weight_norm(nn.Linear(9 * C, 8))
    ),
    "transposed": lambda: parametrizations.weight_norm(nn.ConvTranspose1d(C, 8, 4, 2)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights_are_packed_once(name: str) -> None:
    """They are packed again when a parameter that they are computed from changes."""
    model, x = Net(COMPUTED[name]()), torch.randn(2, C, 9)
    f = compiled(model)
    with torch.no_grad():
        assert 30 < sqnr(model(x), f(x)) < 70
        packs = qfx.weights.cache.CACHE.packs
        f(x)
        assert qfx.weights.cache.CACHE.packs == packs
        next(p for n, p in model.named_parameters() if "original" in n).mul_(1.5)
        assert 30 < sqnr(model(x), f(x)) < 70
        assert qfx.weights.cache.CACHE.packs == packs + ("spectral" not in name or 1)
    report = qfx.explain(model, x, options={"minimum_gain": 0})
    assert (report.quantized, report.total) == (1, 1), report


@pytest.mark.parametrize("shape", [(1, 6, C), (4, 6, C), (1, 4, 6, C)], ids=str)
def test_stacks_of_computed_weights_are_products_of_two_activations(shape: tuple[int, ...]) -> None:
    """As relative positions of attention have them: they are multiplied matrix by matrix."""

    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(shape))

        def forward(self, x: Tensor) -> Tensor:
            return x @ F.pad(self.table, (0, 0, 1, 1)).transpose(-2, -1)

    model, x = Relative(), torch.randn(4, 8, C)
    with torch.no_grad():
        gm, plan = qfx.rewrite(qfx.trace(model, x), qfx.Config(minimum_gain=0))
        assert sqnr(model(x), gm(x)) > 25
    assert len(plan.entries) == 1


def test_statistics_that_change_are_seen() -> None:
    model, x = Net(conv(), nn.BatchNorm2d(C)), torch.randn(1, C, 5, 5)
    f, norm = compiled(model), next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    with torch.no_grad():
        f(x)
        norm.running_mean.add_(3)  # type: ignore[union-attr]
        norm.weight.mul_(2)
        assert 30 < sqnr(model(x), f(x)) < 70
        model.train()
        torch.manual_seed(0)
        assert 25 < sqnr(model(x), f(x)) < 70


def test_invalidated_sources_are_read_again() -> None:
    """One element, written behind PyTorch's back where no sample looks."""
    model, x = Net(parametrizations.weight_norm(nn.Conv1d(C, 64, 3))), torch.randn(2, C, 9)
    f = compiled(model)
    with torch.no_grad():
        f(x)
        v = model.modules_in_order[0].parametrizations.weight.original1  # type: ignore[index, union-attr]
        v.detach().numpy().reshape(-1)[3001] = 50.0
        qfx.invalidate(model)
        assert 30 < sqnr(model(x), f(x)) < 70


def test_layers_with_one_graph_have_weights_of_their_own() -> None:
    """Two models of equal graphs share the compiled function, not the folded weights."""
    x, models = torch.randn(1, C, 5, 5), [Net(conv(), nn.BatchNorm2d(C)) for _ in range(2)]
    blocks = Net(*models)
    f = compiled(blocks)
    with torch.no_grad():
        for _ in range(2):
            assert 25 < sqnr(blocks(x), f(x)) < 70


# --- groups of channels ---


def depthwise(kernel: int, stride: int) -> Net:
    how: Any = {"padding": kernel // 2, "groups": C, "bias": kernel == 3}
    return Net(nn.Conv2d(C, C, kernel, stride, **how), nn.BatchNorm2d(C), nn.SiLU())


GROUPED: dict[str, Callable[[], nn.Module]] = {
    "3x3": lambda: Net(conv(groups=2)),
    "1x1, relu": lambda: Net(nn.Conv2d(C, 2 * C, 1, groups=4), nn.ReLU()),
    "norm": lambda: Net(conv(groups=4, bias=False), nn.BatchNorm2d(C), nn.SiLU()),
    "computed": lambda: Net(parametrizations.weight_norm(conv(groups=2), dim=2)),
    **{
        f"depthwise {kernel}x{kernel}, stride {stride}": partial(depthwise, kernel, stride)
        for kernel, stride in ((3, 1), (3, 2), (4, 1), (5, 2), (7, 1))
    },
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_are_one_call(name: str) -> None:
    model, x = GROUPED[name](), torch.randn(2, C, 6, 5)
    gm = rewritten(model, x)
    operators = [name for name in called(gm) if name in ("conv_dynamic", "conv_depthwise")]
    assert operators == ["conv_depthwise" if "depthwise" in name else "conv_dynamic"], called(gm)
    with torch.no_grad():
        wanted, got = model(x), compiled(model)(x)
        assert sqnr(wanted, gm(x)) > 30 and sqnr(wanted, got) > 30
        assert got.stride() == wanted.stride()
    report = qfx.explain(model, x, options={"minimum_gain": 0})
    assert (report.quantized, report.total) == (1, 1), report


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Conv2d(C, C, 3, padding=2, dilation=2, groups=C), "a dilation along lines"),
        (nn.Conv2d(C, 2 * C, 3, groups=C), "a convolution in 32 groups of 2 outputs each"),
        (nn.Conv2d(C, C, 2, groups=C), "K=4: below 8 features"),
        (conv(groups=8), "a convolution in 8 groups of 4 outputs each"),
        (nn.ConvTranspose2d(C, C, 2, groups=2), "a transposed convolution in 2 groups"),
    ],
)
def test_groups_that_stay_float_say_why(module: nn.Module, reason: str) -> None:
    report = qfx.explain(Net(module), torch.randn(1, C, 4, 4), options={"minimum_gain": 0})
    assert len(report.rows) == 1 and reason in report.rows[0].reason


def test_groups_have_no_scales_for_columns() -> None:
    """Each group would need a factor of its own for x."""
    scheme = qfx.Scheme(w=qfx.QSpec(axes=(0,)))
    model, x = Net(conv(groups=2)), torch.randn(1, C, 4, 4)
    report = qfx.explain(model, x, options={"scheme": scheme, "minimum_gain": 0})
    assert "which" in report.rows[0].reason and report.quantized == 0


def test_depthwise_convolutions_over_one_axis_and_three() -> None:
    for module, x, int8 in (
        (nn.Conv1d(C, C, 9, groups=C), torch.randn(2, C, 20), 1),
        (nn.Conv3d(C, C, 3, groups=C), torch.randn(1, C, 4, 4, 4), 0),
    ):
        model = Net(module)
        with torch.no_grad():
            assert sqnr(model(x), compiled(model)(x)) > 30
        report = qfx.explain(model, x, options={"minimum_gain": 0})
        assert (report.quantized, report.total) == (int8, 1), report
    assert "a depthwise convolution over 3 axes" in report.rows[0].reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_depthwise_convolutions_of_halves_and_other_sizes(dtype: torch.dtype) -> None:
    model = depthwise(3, 1).to(dtype)
    f = torch.compile(model, backend="qfx", dynamic=True, options={"minimum_gain": 0})
    with torch.no_grad():
        for sizes in ((2, C, 6, 5), (1, C, 9, 12), (3, C, 7, 7)):
            x = torch.randn(sizes).to(dtype)
            assert sqnr(model(x).float(), f(x).float()) > 30


def test_groups_train_in_float() -> None:
    model, x = Net(conv(groups=2)), torch.randn(1, C, 4, 4)
    gradients = []
    for f in (model, compiled(model, inner="aot_eager")):
        model.zero_grad()
        f(x).square().sum().backward()
        gradients.append(model.modules_in_order[0].weight.grad)  # type: ignore[union-attr]
    torch.testing.assert_close(*gradients)


# --- layouts ---


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu(self.b(F.silu(self.a(x))) + x)
        return y


def copies(gm: fx.GraphModule) -> int:
    return sum(calls(n, aten.contiguous) for n in gm.graph.nodes)


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "two": (lambda: Net(conv(), nn.SiLU(), conv()), 1),
    "residual": (lambda: Net(Residual(), Residual()), 1),
    "pooled": (lambda: Net(conv(), nn.MaxPool2d(2), conv()), 1),
    "into a linear": (
        lambda: Net(conv(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, C)), 0,
    ),
    "viewed": (lambda: Net(conv(), conv(), end=lambda y: y.view(y.shape[0], -1)), 1),
    "viewed in between": (
        lambda: Net(conv(), nn.ReLU(), end=lambda y: (F.conv2d(y, y[:C, :, :3, :3]), y.view(-1))),
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_channels_stay_last_between_convolutions(name: str, layout: torch.memory_format) -> None:
    make, count = LAYOUTS[name]
    model = make().to(memory_format=layout)
    x = torch.randn(C, C, 6, 6).contiguous(memory_format=layout)
    if layout == torch.channels_last and "viewed" in name:
        return  # which eager mode refuses
    with torch.no_grad():
        wanted, got = model(x), compiled(model)(x)
    for a, b in zip(*((y,) if isinstance(y, Tensor) else y for y in (wanted, got)), strict=True):
        assert sqnr(a, b) > 20 and a.stride() == b.stride()
    if layout == torch.contiguous_format:
        assert copies(rewritten(model, x)) == count
