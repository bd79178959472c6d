"""Installed, qfx is a backend by name in a process that never imports it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = model
    def forward(self, x):
        return self.body(x)
assert "qfx" in torch._dynamo.list_backends()
assert "qfx" not in sys.modules or "TORCH_LOGS" in os.environ
options = {"minimum_gain": 0, "inner": "aot_eager", "scheme": "w8a8-asymmetric"}
f = torch.compile(Outer(), backend="qfx", options=options)
x = torch.randn(8, 64)
with torch.no_grad():
    y = f(x)
error = ((y - model(x)).norm() / model(x).norm()).item()
assert 0 < error < 0.05, error
print("int8 by name")
"""


def _run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_backend_by_name_in_a_fresh_process() -> None:
    result = _run(SCRIPT)
    assert "int8 by name" in result.stdout, result.stderr


def test_plan_in_torch_logs() -> None:
    result = _run(SCRIPT, TORCH_LOGS="+qfx")
    assert "2 of 2 matmuls in int8" in result.stderr, result.stderr
    assert "qfx.linear_dynamic" in result.stderr


@pytest.mark.parametrize("name", ["avx2", "ref"])
def test_forced_instruction_set(name: str) -> None:
    import qfx._C as _C

    if name not in _C.isas():
        pytest.skip(reason=f"this processor has no {name}")
    result = _run("import torch, qfx._C as c; print(c.isa())", QFX_CPU_ISA=name)
    assert result.stdout.strip() == name


def test_an_impossible_instruction_set_is_an_error() -> None:
    result = _run("import torch, qfx", QFX_CPU_ISA="z80")
    assert "'z80' is unknown or not supported by this processor, which has: " in result.stderr


def test_kernels_are_named_by_tile_and_instruction_set() -> None:
    import qfx._C as _C

    names = {k["name"] for k in _C.kernels()}
    assert "s8s8_gemm_1x32__ref" in names
    assert all(_C.kernel_for(m) in names for m in (1, 2, 16, 100, 10**6))
