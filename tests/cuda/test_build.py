"""The CUDA kernels compile for 8.0 and Hopper (in the long profile for 7.5 too), keep to registers
and use the instructions that they are written for; the extension that holds them loads on a PyTorch
without CUDA."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qfx._C as _C
from qfx.ops.layout import Layout
from qfx.ops.weight import cuda_packed_size
from tests.cuda import objects as cuda_objects

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted(s.stem for s in (ROOT / "csrc" / "cuda").rglob("*.cu")), *cuda_objects.HOPPER]
ARCHITECTURES = cuda_objects.ARCHITECTURES
# Instructions, as regular expressions, that the fast paths of a source consist of.
INSTRUCTIONS = [
    (source, architecture, pattern)
    for source, patterns in {
        "binary": (r"BMMA\..*POPC", r"LDSM\.16\.M88\.4"),
        "copy_rows": (r"IDP\.4A\.S8\.S8", r"STG\.E\.128(\.SYS)?"),
        "dequantize": (r"LDG\.E\.EF\.128(\.SYS)?", r"STG\.E\.128(\.SYS)?"),
        "fake_quantize": (r"LDG\.E\.EF\.128(\.SYS)?", r"STG\.E\.128(\.SYS)?"),
        "gemm": (r"IMMA\..*S8\.S8", r"LDSM\.16\.M88\.4"),
        "gemv": (r"LDG\.E\.EF\.128(\.SYS)?", r"LDG\.E\.64(\.SYS)?", r"PRMT"),
        "groups": (r"IMMA\..*S8\.S8", r"LDSM\.16\.M88\.4"),
        "lowbit": (r"LDG\.E\.EF\.128(\.SYS)?", r"LDG\.E\.64\.CONSTANT(\.SYS)?", r"PRMT"),
        "lowbit_values": (r"LDG\.E\.EF\.128(\.SYS)?", r"STG\.E\.128(\.SYS)?", r"PRMT"),
        "pack": (r"IDP\.4A\.S8\.S8", r"LDG\.E\.EF(\.SYS)?"),
        "quantize": (r"LDG\.E\.EF\.128(\.SYS)?", r"STG\.E\.64(\.SYS)?"),
        "rotate": (r"LDG\.E\.EF\.128(\.SYS)?", r"STG\.E\.128(\.SYS)?", r"SHFL\.BFLY"),
        "signs": (r"VOTE\.ANY", r"POPC"),
        "stochastic": (r"LDG\.E\.EF\.128(\.SYS)?", r"STG\.E\.64(\.SYS)?"),
    }.items()
    for architecture in ARCHITECTURES
    for pattern in patterns
]
# The widest products, and copies past the registers, that came after Turing.
INSTRUCTIONS += [
    (source, "80", pattern)
    for source, product in (
        ("gemm", r"IMMA\.16832\.S8\.S8"),
        ("groups", r"IMMA\.16832\.S8\.S8"),
        ("binary", r"BMMA\.168256\.AND\.POPC"),
    )
    for pattern in (product, r"LDGSTS\.E\.BYPASS\.128.*")
]
INSTRUCTIONS += [
    ("lowbit", "80", pattern)
    for pattern in (r"HMMA\.16816\.F32\.BF16", r"HMMA\.16816\.F32", r"LDG\.E\.128\.CONSTANT")
]
LOADS = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("qfx._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["qfx._C"] = module
spec.loader.exec_module(module)
import qfx
assert module.cuda_architectures() == [*sys.argv[2:], "90a"], module.cuda_architectures()
assert torch._C._dispatch_has_kernel_for_dispatch_key("qfx::quantize", "CUDA")
q, scale, zero = torch.ops.qfx.quantize(torch.tensor([[1.0, -2.0]]), [8, 1, 0, 0, 0])
assert q.tolist() == [[64, -127]]
print("int8 on the CPU")
"""


def object_of(source: str) -> Path:
    (path,) = (o for o in cuda_objects.objects() if o.name == f"{source}.cu.o")
    return path


@pytest.mark.parametrize("source", SOURCES)
def test_kernels_keep_to_registers(source: str) -> None:
    memory = cuda_objects.memory_of_kernels(object_of(source))
    assert memory and {name for name, size in memory.items() if size > 0} == set()


def test_a_planted_stack_is_found(tmp_path: Path) -> None:
    """An array that is indexed at run time cannot stay in registers."""
    cuda_objects.build()  # skips without nvcc
    source, compiled = tmp_path / "planted.cu", tmp_path / "planted.o"
    body = "int a[64]; for (int i = 0; i < 64; ++i) a[i] = p[i] * p[i + 1]; *p = a[*p & 63];"
    source.write_text(f"__global__ void planted(int* p) {{ {body} }}")
    command = ["nvcc", "-arch=sm_80", "-c", str(source), "-o", str(compiled)]
    subprocess.run(command, check=True, timeout=120)
    (size,) = cuda_objects.memory_of_kernels(compiled).values()
    assert size >= 256


@pytest.mark.parametrize("source, architecture, pattern", INSTRUCTIONS)
def test_expected_instructions(source: str, architecture: str, pattern: str) -> None:
    names = cuda_objects.instructions_of(object_of(source), architecture)
    assert any(re.fullmatch(pattern, name) for name in names), sorted(names)


def test_an_extension_with_cuda_kernels_loads_without_cuda() -> None:
    command = [sys.executable, "-c", LOADS, str(cuda_objects.extension()), *ARCHITECTURES]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "int8 on the CPU" in result.stdout, result.stderr


@given(
    st.integers(0, 70), st.sampled_from([0, 1, 16, 600, 65792]),
    st.sampled_from([0, 64, 576, 65792, 10**9]), st.booleans(), st.integers(0, 1),
)  # fmt: skip
def test_sizes_of_packed_weights(n: int, k: int, group: int, of_groups: bool, shift: int) -> None:
    """What C++ says is what the fake implementation computes."""
    group = group // 64 * 64
    layout = Layout(n, 8, group, group * of_groups, shift)
    assert _C.cuda_packed_size(list(layout), k) == cuda_packed_size(layout, k)
