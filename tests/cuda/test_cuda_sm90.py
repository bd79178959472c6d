"""The Hopper kernels (csrc/cuda/sm90/gemm.cuh), which an H100 ran too: on the emulator against
exact sums; broken on purpose, which the emulator must see; compiled, their machine code read."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.cuda import emulator as cuda_emulator
from tests.cuda import objects as cuda_objects
from tests.lib.pairs import covering
from tests.lib.rows import ALL_ROWS, Row, reached
from tests.ops.test_op_parts import as_tuple, assert_equals

ROOT = Path(__file__).resolve().parents[2]
SM90 = ROOT / "csrc" / "cuda" / "sm90"
KERNEL = {name: (SM90 / name).read_text() for name in ("gemm.cuh", "ring.cuh")}


@dataclass(frozen=True)
class Broken:
    """One change of the kernel, and what the emulator says of it."""

    name: str
    kernel: str
    old: str
    new: str
    symptom: str


WRONG = r"element \d+ is -?\d+, expected"
BROKEN = (
    Broken("stage_released_early", "s8_swap16", "wgmma_wait<1>();", "wgmma_wait<2>();", WRONG),
    Broken("sums_read_early", "s8_swap16", "wgmma_wait<0>();", "", WRONG),
    Broken("registers_not_handed_over", "s8_swap8", "wgmma_fence();", "",
           "registers that no wgmma.fence has handed over"),
    Broken("parity_of_consumer", "s8_swap8", "wait_phase(ring.full + at.stage, at.parity);",
           "wait_phase(ring.full + at.stage, at.parity ^ 1);", f"deadlock in block|{WRONG}"),
    Broken("parity_of_producer", "s8_swap8", "at.parity ^ 1);", "at.parity);", "deadlock in block"),
    Broken("parity_of_skipped_tiles", "s8_128x128", "parity ^= stage / C::kStages & 1;", "",
           f"deadlock in block|{WRONG}"),
    Broken("turns_not_awaited", "s8_128x128", "wait_phase(ring.turn + group, parity);", ";", WRONG),
    Broken("stage_never_released", "s8_swap8",
           "if (step > 0) release<C>(ring.empty + previous);", "", "deadlock in block"),
    Broken("not_all_warps_waited_for", "s8_128x256",
           "init_barrier(ring.empty + s, 4 * C::kWarpgroups * C::kCluster);",
           "init_barrier(ring.empty + s, 4);", f"beyond the 4 of its phase|{WRONG}"),
    Broken("fewer_bytes_expected", "s8_swap8", "arrive_expecting(full, C::kStageBytes);",
           "arrive_expecting(full, C::kStageBytes - 16);", f"deadlock in block|{WRONG}"),
    Broken("barriers_not_shown", "s8_swap8", "  show_barriers();", "",
           "no fence has shown to the copy engine"),
    Broken("barriers_not_ready", "s8_swap8", "init_barriers(ring);\n  __syncthreads();",
           "init_barriers(ring);", "was not initialized"),
    Broken("piece_overwritten", "s8_128x128",
           "p.size, sums, out);\n    __syncwarp();", "p.size, sums, out);", WRONG),
    Broken("step_of_k", "b1_swap16", "rows + i * 2, right + i * 2", "rows + i * 2, right + i * 4",
           f"a wgmma tile at byte|{WRONG}"),
    Broken("stride_of_tile", "s8_swap16", "kStride = kTileAlign >> 4", "kStride = kTileAlign >> 5",
           WRONG),
    Broken("finished_too_soon", "s8_swap8", "p.splits - 1;", "p.splits - 2;", WRONG),
    Broken("other_block_not_counted", "s8_128x256x2", "4 * C::kWarpgroups * C::kCluster);",
           "4 * C::kWarpgroups);", f"deadlock in block|{WRONG}"),
    Broken("other_block_not_waited_for", "s8_128x256x2", "arrive_at(empty, lane);",
           "arrive_at(empty, block_in_cluster());", f"deadlock in block|{WRONG}"),
    Broken("other_block_not_told", "s8_128x256x2", "if (lane < C::kCluster) arrive_at",
           "if (lane == 0) arrive_at", "deadlock in block"),
    Broken("cluster_not_ready", "s8_128x256x2",
           "sync_cluster();  // before the other blocks' barriers are used", ";",
           "was not initialized|no fence has shown"),
    Broken("block_gone", "s8_128x256x2",
           "sync_cluster();  // others still arrive at this block's barriers", ";",
           "which has exited"),
    Broken("loaded_for_one_block", "s8_128x256x2", "kAllBlocks = (1u << C::kCluster) - 1;",
           "kAllBlocks = 1;", "deadlock in block"),
    Broken("part_at_wrong_place", "s8_128x256x2", "to + first * kTileBytes", "to", WRONG),
    Broken("part_of_wrong_rows", "s8_128x256x2", "row + first, matrix", "row, matrix", WRONG),
)  # fmt: skip


def run(command: Sequence[str | Path], timeout: float = 300) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    text = result.stdout + result.stderr
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{text}"
    return text


def write_broken(b: Broken) -> str:
    """Its headers in the build folder, unless they are there; what CMake takes."""
    count = sum(text.count(b.old) for text in KERNEL.values())
    assert count == 1, f"{b.name}: '{b.old}' is {count} times in the kernel"
    folder = cuda_emulator.BUILD / "broken" / b.name / "cuda" / "sm90"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in KERNEL.items():
        path, broken = folder / name, text.replace(b.old, b.new)
        if not path.exists() or path.read_text() != broken:
            path.write_text(broken)
    return f"{b.name}={b.kernel}"


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of sm90_tests, choice_tests and broken_<name>."""
    build = cuda_emulator.build()
    broken = ";".join(write_broken(b) for b in BROKEN)
    run(["cmake", f"-DQFX_BROKEN={broken}", build])
    run(["cmake", "--build", build, "--target", "sm90_programs"])
    return build


@pytest.mark.parametrize("name", cuda_objects.HOPPER)
def test_sums_are_exact_in_any_order_of_threads_and_copies(name: str, programs: Path) -> None:
    assert f"{name} ok" in run([programs / "sm90_tests", name])


@pytest.mark.parametrize("broken", BROKEN, ids=lambda b: b.name)
def test_the_emulator_sees_that_a_kernel_is_broken(broken: Broken, programs: Path) -> None:
    command = [programs / f"broken_{broken.name}", broken.kernel]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stdout
    assert re.search(broken.symptom, result.stdout), result.stdout


def object_of(name: str) -> Path:
    (path,) = (o for o in cuda_objects.objects() if o.name == f"{name}.cu.o")
    return path


@pytest.mark.parametrize("name", cuda_objects.HOPPER)
def test_the_machine_code_has_what_hopper_is_for(name: str) -> None:
    right = int(re.findall(r"(?:x|swap)(\d+)", name)[0])
    product = f"IGMMA.64x{right}x32.S8.S8" if "s8" in name else f"BGMMA.64x{right}x256.AND.POPC"
    found = cuda_objects.instructions_of(object_of(name), "90a")
    assert {product, "UTMALDG.3D", "SYNCS.PHASECHK.TRANS64.TRYWAIT"} <= found
    of_clusters = {"UTMALDG.3D.MULTICAST", "UCGABAR_ARV", "UCGABAR_WAIT"}
    assert of_clusters & found == (of_clusters if name.endswith("x2") else set())
    moved = {"USETMAXREG.DEALLOC.CTAPOOL", "USETMAXREG.TRY_ALLOC.CTAPOOL"}
    assert moved & found == (set() if "swap" in name else moved)
    assert {i for i in found if re.match(r"LDL|STL|IMMA|BMMA", i)} == set()


PRODUCTS = ("int8_mm", "int8_bmm", "linear", "linear_requantize", "binary_mm", "binary_linear")
ROWS_OF_PRODUCTS = covering(
    [
        row
        for row in ALL_ROWS
        if row.k < 60000 and row.layout.one_scale and not row.x_groups and row.op in PRODUCTS
    ],
    reached,
)


@pytest.mark.parametrize("row", ROWS_OF_PRODUCTS, ids=str)
def test_operators_by_the_hopper_kernels(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFX_CUDA_KERNEL", "sm90")
    cuda_emulator.emulate(capability=90)
    got = cuda_emulator.run(row.op, *cuda_emulator.arguments_of(row))
    expected = cuda_emulator.reference_of(row.op)(*row.arguments())
    assert_equals(row, row.arguments(), as_tuple(got), as_tuple(expected))


def test_a_forced_kernel_on_another_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFX_CUDA_KERNEL", "s8_swap8")
    cuda_emulator.emulate(capability=80)
    codes, zero = torch.ones(1, 16, dtype=torch.int8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"9\.0, but the emulator has 8\.0"):
        cuda_emulator.run("int8_mm", codes, zero, cuda_emulator.packed_codes(codes), 1)


def test_the_choice_of_a_kernel(programs: Path) -> None:
    assert "choice ok" in run([programs / "choice_tests"])
