"""Exported programs and packages of int8 models: their bits in another process, at several sizes,
and what a process without qfx says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import qfx
from tests.lib.fresh_process import run_python

FEATURES, HEADS = 64, 4


class Encoder(nn.Module):
    """A layer of a transformer without norms, whose float operators Inductor computes like
    PyTorch, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        each = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(*each).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, FEATURES))


def quantized(model: nn.Module) -> nn.Module:
    return qfx.quantize_(model.eval())


def rewritten(model: nn.Module) -> nn.Module:
    x = torch.randn(2, 7, FEATURES)
    return qfx.rewrite(qfx.trace(model.eval(), x), qfx.Config(minimum_gain=0))[0]


def in_two_schemes(model: Any) -> nn.Module:
    """The second half has float activations."""
    first, second = model.eval()
    return nn.Sequential(qfx.quantize_(first), qfx.quantize_(second, qfx.Config(scheme="w8")))


# Name -> the float model, its dtype, how it becomes int8.
MODELS: dict[str, tuple[Any, torch.dtype, Any]] = {
    "encoder": (Encoder, torch.float32, quantized),
    "bfloat16": (lambda: nn.Sequential(mlp(), mlp()), torch.bfloat16, in_two_schemes),
    "rewritten": (mlp, torch.float32, rewritten),
}
PACKED = ("encoder", "bfloat16")
SIZES = ((2, 7), (1, 1), (5, 33), (1, 128))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of each model, packages of some, and inputs with the outputs of the models."""
    path = tmp_path_factory.mktemp("exported")
    for name, (make, dtype, to_int8) in MODELS.items():
        torch.manual_seed(0)
        model = to_int8(make().to(dtype))
        inputs = [torch.randn(*size, FEATURES, dtype=dtype) for size in SIZES]
        dims = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
        with torch.no_grad():
            program = torch.export.export(model, (inputs[0],), dynamic_shapes=dims)
            torch.save([(x, model(x)) for x in inputs], path / f"{name}.pt")
            torch.export.save(program, path / f"{name}.pt2")
            if name in PACKED:
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(path / f"{name}.package.pt2")
                )
    return path


def test_other_processes_compute_the_same_bits(folder: Path) -> None:
    found = run_python(
        f"""
import qfx, torch
for name in {[*MODELS]}:
    run = torch.export.load(name + ".pt2").module()
    runs = [run]
    if name in {PACKED}:
        runs.append(torch._inductor.aoti_load_package(name + ".package.pt2"))
    for x, y in torch.load(name + ".pt"):
        with torch.inference_mode():
            same = [torch.equal(run(x), y) and run(x).dtype == y.dtype for run in runs]
        print(name, *same, sep=",")
""",
        folder=folder,
    )
    same = {name: ",True" * (1 + (name in PACKED)) for name in MODELS}
    lines = [name + same[name] for name in MODELS for _ in SIZES]
    assert (found.stdout.splitlines(), found.returncode) == (lines, 0), found.stderr


REFUSED = {
    # A sentence of PyTorch that names the operator, in a warning of `torch.export.load`.
    'torch.export.load("rewritten.pt2")': (
        "We failed to resolve torch.ops.qfx.linear_dynamic.default to an operator"
    ),
    'torch._inductor.aoti_load_package("bfloat16.package.pt2")': (
        "RuntimeError: Could not find schema for qfx::linear_float"
    ),
    'torch._inductor.aoti_load_package("encoder.package.pt2")(torch.zeros(2, 7, 64))': (
        "RuntimeError: the package calls qfx::linear_dynamic: import qfx before it is loaded"
    ),
}


@pytest.mark.parametrize("call", REFUSED)
def test_without_qfx_the_error_names_it(call: str, folder: Path) -> None:
    found = run_python(f"import torch\n{call}", folder=folder)
    assert found.returncode != 0 and REFUSED[call] in found.stderr, found.stderr


def test_a_program_of_a_quantized_model_imports_qfx(folder: Path) -> None:
    """Its weights are parameters of a class of qfx, which the file names."""
    found = run_python(
        'import torch, sys\ntorch.export.load("encoder.pt2")\nprint("qfx" in sys.modules)',
        folder=folder,
    )
    assert (found.stdout, found.returncode) == ("True\n", 0), found.stderr
