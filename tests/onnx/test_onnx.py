"""ONNX: what ONNX Runtime computes of an exported int8 model is what qfx computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.export import Dim

import qfx
from qfx.graph.activations import ACTIVATIONS
from qfx.onnx import linears
from qfx.ops.code import code_of, Code
from qfx.ops.quantize import code_range
from qfx.ops.ste import weight_values
from tests.nn.test_nn_linear import VARIED, made
from tests.nn.test_nn_lowbit import made as made_packed
from tests.nn.test_nn_lowbit import with_minimums

WHY = "the extra `onnx` is not installed"
onnxruntime = pytest.importorskip("onnxruntime", reason=WHY)
pytest.importorskip("onnxscript", reason=WHY)
ROUNDING = 2.0**-24  # of a float32 operation, relative
ROWS = torch.randn(3, 7, 200, generator=torch.Generator().manual_seed(0))
ops = torch.ops.qfx


def exported(model: nn.Module, inputs: tuple[Tensor, ...], dims: Any, weights: str = "uint8") -> Any:
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=dims)
    table = qfx.onnx_translation_table(weights)
    return torch.onnx.export(
        program, custom_translation_table=table, opset_version=21, verbose=False
    )


class Session:
    """ONNX Runtime with the model of a file, on one thread of the CPU."""

    def __init__(self, model: Any, path: Path) -> None:
        model.save(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.optimized_model_filepath = str(path) + ".optimized"
        self.running = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.optimized = Path(options.optimized_model_filepath).read_bytes()

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        names = [each.name for each in self.running.get_inputs()]
        given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in self.running.run(None, given)]


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
    session = Session(exported(rows, (ROWS,), dims), tmp_path / "rows.onnx")
    with torch.no_grad():
        expected = rows(ROWS)
    found = session(ROWS)
    each = zip(modules.items(), expected, found, strict=True)
    over = {name: ((y - z).abs() / allowed(m)).max().item() for (name, m), y, z in each}
    assert {name: ratio for name, ratio in over.items() if not ratio <= 1} == {}
    assert session.optimized.count(b"MatMulIntegerToFloat") > 5
