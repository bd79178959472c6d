"""What is planned for a GPU, without one: which matmuls may be int8, at which predicted cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx import _C
from qfx.cost import gpu
from qfx.cost.gpu import BATCHED, HERE, PASSES, PRODUCTS, GpuCost, GpuTable, parts, slug
from qfx.cost.model import GpuCosts
from qfx.match.matching import match
from qfx.plan.plan import Plan
from qfx.plan.policy import decide
from tests.cuda.graphs import as_if_built, on_cuda

NAME = "Synthetic GPU of tests/cost/test_gpu_plan.py"
MKN = ((1, 16, 256, 8192), (128, 1024, 8192), (128, 512, 2048, 16384))
BATCHED_MKN = ((64, 1024), (64, 256), (64, 1024))
MK = MKN[:2]
BATCH = 64
COPY, FLOAT, INT8, LAUNCH = 4e12, 1.6e15, 2.6e15, 2e-6  # bytes, floats, int8 a second; seconds


def _seconds(what: str, m: int, k: int, n: int = 1) -> float:
    """Of a GPU whose products reach either their arithmetic or their memory's speed."""
    if what in PASSES:
        return LAUNCH + 3 * m * k / COPY
    count = BATCH if what in BATCHED else 1
    speed, width = (FLOAT, 2) if what.startswith("float") else (INT8, 1)
    return LAUNCH + count * max(2 * m * k * n / speed, width * (m * k + n * k) / COPY)


def _nested(f: Callable[..., float], axes: tuple[tuple[int, ...], ...]) -> Any:
    if not axes:
        return f()
    return [_nested(lambda *rest, p=p: f(p, *rest), axes[1:]) for p in axes[0]]


def raw_table() -> dict[str, Any]:
    axes = {**dict.fromkeys(PRODUCTS, MKN), **dict.fromkeys(BATCHED, BATCHED_MKN)}
    axes |= dict.fromkeys(PASSES, MK)
    grids = {
        what: _nested(lambda *sizes, what=what: _seconds(what, *sizes), axes[what]) for what in axes
    }
    return {
        "schema": gpu.SCHEMA,
        "gpu": NAME,
        "batch": BATCH,
        "axes": {"mkn": MKN, "batched": BATCHED_MKN, "mk": MK},
        "seconds": {"bfloat16": grids},
        "training": {"bfloat16": [1e-12, 1e-12]},
    }


TABLE = GpuTable.read(json.dumps(raw_table()))
SYNTHETIC = GpuCost(TABLE)
W8A8 = qfx.Scheme(x=qfx.QSpec(symmetric=False))


def _synthetic(device: torch.device, dtype: torch.dtype, scheme: qfx.Scheme | None) -> Any:
    return SYNTHETIC.lacks(dtype, scheme) or SYNTHETIC


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_built(monkeypatch)


def _plan(
    module: nn.Module, x: Tensor, config: qfx.Config, gpu_costs: GpuCosts = gpu.cost_of
) -> Plan:
    with torch.no_grad():
        return decide(match(on_cuda(qfx.trace(module, x))), config, None, gpu_costs)


def _linear(m: int, k: int, n: int) -> tuple[nn.Module, Tensor]:
    return nn.Linear(k, n, dtype=torch.bfloat16), torch.ones(m, k, dtype=torch.bfloat16)


def _reason(plan: Plan) -> str:
    (entry,) = plan.entries
    assert entry.scheme is None
    return entry.reason


# --- what is possible ---


def test_a_build_without_cuda_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cuda_architectures", list)
    plan = _plan(*_linear(4, 64, 64), qfx.Config(minimum_gain=0))
    assert _reason(plan) == "the input is on cuda, and this qfx was built without CUDA kernels"


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Multiplies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


X = torch.ones(64, 512, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("module", "x", "options", "reason"),
    [
        (Attends(), X, {}, "an attention on cuda, for which int8_attention has no kernel"),
        (*_linear(4, 64, 64), {"guard": 0.1, "minimum_gain": 0},
         "guard=0.1: int8_linear_guarded has no kernel for cuda"),
        (*_linear(4, 64, 64), {}, "no measured table for a GPU that is not there; run python -m "
         "benchmarks.gpu, or set minimum_gain=0"),
        (Multiplies(), X, {"scheme": "w8a8-asymmetric"}, "a matmul of two activations: no measured "
         "table for a GPU that is not there"),
    ],
)  # fmt: skip
def test_what_stays_float_says_why(
    module: nn.Module, x: Tensor, options: dict[str, Any], reason: str, cuda_build: None
) -> None:
    assert _reason(_plan(module, x, qfx.Config(**options))) == reason


def test_minimum_gain_zero_quantizes_what_is_not_measured(cuda_build: None) -> None:
    (entry,) = _plan(*_linear(4, 64, 64), qfx.Config(minimum_gain=0)).entries
    assert entry.scheme is not None
    assert entry.reason == "int8; no measured table for a GPU that is not there"


# --- what it costs ---


@pytest.mark.parametrize(("m", "k", "n"), [*product(*MKN)])
def test_the_points_of_the_table_are_as_measured(m: int, k: int, n: int) -> None:
    found = SYNTHETIC.estimate(m, k, n, torch.bfloat16, W8A8)
    assert found.float_s == pytest.approx(_seconds("float", m, k, n), rel=1e-9)
    expected = _seconds("int8", m, k, n) + _seconds("quantize", m, k)
    assert found.int8_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("m", [3, 100, 5000])
@pytest.mark.parametrize("n", [300, 1000, 12288])
def test_between_the_points_it_lies_between_them(m: int, n: int) -> None:
    """Per unit of work: as little as its cheapest neighbour, as much as its dearest."""
    k = 3000
    around = [
        [p for p in points if q / 64 < p < q * 64] for points, q in zip(MKN, (m, k, n), strict=True)
    ]
    per_unit = [_seconds("float", *p) / (p[0] * p[1] * p[2]) for p in product(*around)]
    found = SYNTHETIC.estimate(m, k, n, torch.bfloat16, W8A8).float_s / (m * k * n)
    assert min(per_unit) <= found <= max(per_unit)


def test_beyond_the_last_point_work_costs_what_it_did_there() -> None:
    last = TABLE.grids["bfloat16", "float"].at(8192, 8192, 16384)
    assert TABLE.grids["bfloat16", "float"].at(16384, 8192, 32768) == pytest.approx(4 * last)


@pytest.mark.parametrize(
    ("m", "k", "n", "gains"),
    [
        (8192, 1024, 16384, True),
        (8192, 1024, 128, False),  # reading x takes longer than multiplying it
        (1, 8192, 16384, True),  # the weight's bytes
        (1, 128, 128, False),  # two launches
    ],
)
def test_small_n_and_small_k_are_refused_by_measurements(
    m: int, k: int, n: int, gains: bool, cuda_build: None
) -> None:
    config = qfx.Config(scheme="w8a8-asymmetric")
    (entry,) = _plan(*_linear(m, k, n), config, _synthetic).entries
    assert (entry.scheme is not None) == gains
    direct = _seconds("int8", m, k, n) + _seconds("quantize", m, k)
    assert entry.estimate is not None
    assert entry.estimate.gain == pytest.approx(_seconds("float", m, k, n) / direct)
    words = "int8 predicted" if gains else "int8 would be"
    assert entry.reason.startswith(f"{words} {entry.estimate.gain:.2f}x float")


def test_a_batch_of_products_by_its_own_grid(cuda_build: None) -> None:
    config = qfx.Config(scheme="w8a8-asymmetric")
    (entry,) = _plan(Multiplies(), X, config, _synthetic).entries
    assert entry.estimate == SYNTHETIC.estimate_bmm(64, 512, 64, 512, torch.bfloat16)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (W8A8, ("int8", "quantize")),
        (qfx.Scheme(rotation=64), ("int8", "rotated")),
        (qfx.Scheme(x=qfx.QSpec(axes=(0, 1))), ("int8", "tensor")),
        (qfx.Scheme(x=qfx.QSpec(static=True, axes=(0, 1))), ("int8", "static")),
        (qfx.Scheme(x=None), ("weight_only", None)),
        (qfx.Scheme(x=None, rotation=64), ("weight_only", "rotate")),
        (qfx.Scheme(x=qfx.QSpec(), w=qfx.QSpec(bits=4, group=64)), ("groups", "quantize")),
    ],
)
def test_a_scheme_is_a_product_and_a_pass(scheme: qfx.Scheme, expected: tuple[str, Any]) -> None:
    assert parts(scheme) == expected


def test_a_rotated_weight_that_trains_costs_its_rotations() -> None:
    plain = SYNTHETIC.training(256, 1024, 512, torch.bfloat16, W8A8)
    turned = SYNTHETIC.training(256, 1024, 512, torch.bfloat16, qfx.Scheme(rotation=64))
    turn = TABLE.grids["bfloat16", "rotate"]
    assert plain == pytest.approx(1e-12 * 1024 * (512 + 256))
    assert turned - plain == pytest.approx(3 * turn.at(512, 1024) + turn.at(256, 1024))


def test_what_the_table_lacks_stays_float_with_the_reason(cuda_build: None) -> None:
    module = nn.Linear(128, 128, dtype=torch.float16)
    plan = _plan(module, torch.ones(8, 128, dtype=torch.float16), qfx.Config(), _synthetic)
    assert _reason(plan).startswith(f"the table of {NAME} has no times of float in float16; run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(schema=0), "a GPU table of schema 0, expected 1"),
        (
            lambda raw: raw["seconds"]["bfloat16"]["int8"].pop(),
            "the grid int8: a table has no list of 4 where",
        ),
        (
            lambda raw: raw["seconds"]["bfloat16"]["rotate"][0].__setitem__(0, 0.0),
            "rotate: a table holds 0.0",
        ),
    ],
)
def test_a_table_that_is_none_is_an_error(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    raw = json.loads(json.dumps(raw_table()))
    change(raw)
    with pytest.raises(ValueError, match=message):
        GpuTable.read(json.dumps(raw))


def test_a_table_is_found_by_its_gpu(tmp_path: Path) -> None:
    (tmp_path / f"{slug(NAME)}.json").write_text(json.dumps(raw_table()))
    assert gpu.table_of(NAME, tmp_path) == TABLE
    assert gpu.table_of("another", tmp_path) is None
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_the_committed_tables_can_be_read() -> None:
    for path in HERE.glob("*.json"):
        assert slug(GpuTable.read(path.read_text()).name) == path.stem
