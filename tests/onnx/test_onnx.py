"""ONNX: what ONNX Runtime computes of an exported int8 model is what qfx computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import qfx
from qfx.graph.activations import ACTIVATIONS
from qfx.onnx import linears
from qfx.onnx.translations import Translations
from qfx.ops import REFERENCES
from qfx.ops.code import Code, code_of
from qfx.ops.quantize import code_range
from qfx.ops.weight_values import weight_values
from tests.lib.onnx_runtime import Session, exported
from tests.nn.test_nn_linear import VARIED, made
from tests.nn.test_nn_lowbit import made as made_packed
from tests.nn.test_nn_lowbit import with_minimums

ROUNDING = 2.0**-24  # of a float32 operation, relative
ROWS = torch.randn(3, 7, 200, generator=torch.Generator().manual_seed(0))
ops = torch.ops.qfx


# --- linears of every scheme ---


class Linears(nn.Module):
    """Linears of one input, of which each takes its K columns."""

    def __init__(self, rows: list[nn.Module]) -> None:
        super().__init__()
        self.rows = nn.ModuleList(rows)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [row(x[..., : row.in_features]) for row in self.rows]


def allowed(module: Any) -> Tensor:
    """How far two computations of a linear of ROWS may be apart, [..., N].

    The codes are equal if K is not rotated. (B4) and the sums of at most 64 products of a matrix
    err by `rotating`, so codes may differ by a step where v / scale is as near to a tie. A float32
    sum of K products, a bias and scales err by a rounding each, of terms that are `size` together.
    """
    scheme, k, x = module.scheme, module.in_features, ROWS[..., : module.in_features]
    given = module.weight.how.given
    w = weight_values(module.weight.frozen.packed, given["layout"], k, torch.float32)
    v = x if module.factor is None else x * module.factor
    turned = ops.rotate(v, None, scheme.rotation)
    matrix = ops.rotate(torch.eye(k), None, scheme.rotation).abs()
    rotating = (64 + 10) * ROUNDING * (v.abs() @ matrix) * (scheme.rotation > 0)
    between, size = rotating, turned.abs()
    if scheme.x is not None:
        code = Code(*code_of(scheme.x))
        q, *each = ops.quantize(turned, list(code), module.x_scale, module.x_zero_point)
        scale, zero = (t.repeat_interleave(code.group or k, -1)[..., :k] for t in each)
        x_hat = ((q - zero) * scale).abs()
        size = x_hat + 256 * scale * (not code.symmetric)  # of the two parts of (q - z) w
        most = rotating.amax(-1, keepdim=True)
        reach = 3 * most / scale + 2.0**-13  # of v, and of its range in the scale
        at_a_tie = ((turned / scale) % 1 - 0.5).abs() <= reach
        at_an_end = (q == code_range(code.bits, bool(code.symmetric))[0]) | (q == 127)
        step = at_a_tie | (at_an_end & (not code.symmetric))  # zero points have ties too
        between = (step * scale + x_hat * 2 * most / (scale * 127)) * (scheme.rotation > 0)
    of_bias = 0 if module.bias is None else module.bias.detach().abs()
    each_nk = w.abs().t()
    return between @ each_nk + 2 * (k + 12) * ROUNDING * (size @ each_nk + of_bias)


def test_linears_of_all_properties_of_schemes(tmp_path: Path) -> None:
    """What is allowed is a hundredth of the error of int8, but for rotated codes at ties."""
    modules: dict[str, Any] = {row: made(row) for row in VARIED}
    for x in (None, qfx.QSpec(symmetric=False), qfx.QSpec(group=64)):
        modules[f"minimums {x}"] = module = made_packed("w4a8")
        module.load_state_dict(with_minimums(4, 64, torch.bfloat16, x)[0])
    rows = Linears([*modules.values()])
    dims = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    session = Session(exported(rows, (ROWS,), dims, optimize=False), tmp_path / "rows.onnx")
    with torch.no_grad():
        expected = rows(ROWS)
    found = session(ROWS)
    each = zip(modules.items(), expected, found, strict=True)
    over = {name: ((y - z).abs() / allowed(m)).max().item() for (name, m), y, z in each}
    assert {name: ratio for name, ratio in over.items() if not ratio <= 1} == {}


# --- operators that modules of linears do not call ---


class Operators(nn.Module):
    """Calls of operators with a packed weight [24, 16], as rewritten graphs have them."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        scale = torch.rand(24, generator=g) / 1000 + 0.001
        codes = torch.randint(-127, 128, (24, 16), generator=g).char()
        self.packed, self.bias = ops.pack_weight(codes, scale), torch.randn(24, generator=g)
        kernels = torch.randint(-127, 128, (2, 24, 3 * 2 * 4), generator=g).char()
        self.stack = torch.stack([ops.pack_weight(each, scale) for each in kernels])
        self.wide = torch.randn(48, generator=g)
        self.fixed = torch.full((1,), 0.02)

    def forward(self, x: Tensor, image: Tensor) -> dict[str, Tensor]:
        code, layout, given = [8, 1, 0, 0, 0], [24, 8, 0, 0, 0], (self.packed, torch.float32)
        found = {
            name: ops.linear_dynamic(x, given[0], layout, self.bias, code, name, given[1])
            for name in ACTIVATIONS
        }
        found["linears 0"], found["linears 1"] = ops.linears(
            x, [self.packed] * 2, layout * 2, [None, self.bias], [8, 0, 0, 0, 0], ["none", "relu"],
            torch.float32,
        )  # fmt: skip
        q, scale, zero = ops.quantize(x, [8, 0, 1, 0, 0])
        found["codes"] = q.float()
        found["scale"], found["zero point"] = scale, zero.float()
        found["linear"] = ops.linear(q, scale, zero, self.packed, layout, None, "none", given[1])
        copied = (q.clone(), scale, zero)
        found["copied"] = ops.linear(*copied, self.packed, layout, None, "none", given[1])
        again = ops.linear_requantize(
            q, scale, zero, self.packed, layout, self.bias, "relu", self.fixed, None, code
        )
        found["requantized"] = again[0] * again[1]
        found["back"] = ops.rotate(x, x[0, 0].abs(), 16, True)
        window = ([3, 2], [2, 1], [1, 0, 2, 1], [1, 3])
        rows = ops.conv_dynamic(
            image, self.stack, layout, self.wide, *window, code, "none", torch.float32
        )
        found["convolution"] = rows
        found["residual"] = ops.conv_dynamic(
            image, self.stack, layout, None, *window, code, "relu", torch.float32, None, rows
        )
        found["windows"] = ops.im2col(image, *window)
        return found


def test_operators(tmp_path: Path) -> None:
    """Codes and windows are equal. A sum has K products and a few operations more, each of a
    magnitude below 127 max |w^| |x|, and functions err by 8 units of the last place."""
    model, g = Operators(), torch.Generator().manual_seed(1)
    x, image = torch.randn(2, 3, 16, generator=g), torch.randn(2, 8, 9, 10, generator=g)
    dims = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC})
    session = Session(
        exported(model, (x, image), dims, optimize=False), tmp_path / "operators.onnx"
    )
    for rows, size in ((2, 9), (1, 12)):
        x, image = torch.randn(rows, 3, 16, generator=g), torch.randn(rows, 8, size, 7, generator=g)
        expected = model(x, image)
        found = dict(zip(expected, session(x, image), strict=True))
        for name in ("codes", "scale", "zero point", "windows"):
            assert torch.equal(found[name], expected[name]), name
        largest = 24 * 0.254 * max(x.abs().max().item(), image.abs().max().item())
        allowed = 2 * (24 + 12) * ROUNDING * largest
        over = {n: (y - expected[n]).abs().max().item() for n, y in found.items()}
        step = {"requantized": 0.02}  # at a tie
        assert {n: d for n, d in over.items() if not d <= step.get(n, allowed)} == {}
        assert max(y.abs().max().item() for y in expected.values()) < 16 * largest


def test_every_activation_has_a_translation() -> None:
    assert [*linears.ACTIVATIONS] == [*ACTIVATIONS]


def test_translations_have_the_names_of_operators() -> None:
    """The table takes them by name, and refuses the other operators."""
    names = {name for name in vars(Translations) if not name.startswith("_")}
    assert names - {*REFERENCES} == set() and len(names) == 10
