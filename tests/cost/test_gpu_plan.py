"""What is planned for a GPU, without one: which matmuls may be int8, at which predicted cost."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
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
from qfx.cost.gpu import BATCHED, HERE, PASSES, PRODUCTS, GpuCost, passes_of, slug
from qfx.cost.model import Estimate, GpuCosts, Work
from qfx.host import gpu_build
from qfx.match.matching import match
from qfx.ops.forms import form_of
from qfx.plan.plan import Plan
from qfx.plan.policy import decide
from tests.cuda.graphs import as_if_built, on_cuda
from tests.lib.pairs import every, pairs

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
        what: {"axes": of, "seconds": _nested(lambda *mkn, what=what: _seconds(what, *mkn), of)}
        for what, of in axes.items()
    }
    numbers = {"training": [1e-12, 1e-12], "batch": [BATCH]}
    tables = {"bfloat16": {"grids": grids, "numbers": numbers}}
    return {"schema": gpu.SCHEMA, "gpu": NAME, "tables": tables}


SYNTHETIC = GpuCost.read(json.dumps(raw_table()))
GRIDS = SYNTHETIC.tables["bfloat16"].grids
W8A8 = qfx.Scheme(x=qfx.QSpec(symmetric=False))


def _linear_work(m: int, k: int, n: int, scheme: qfx.Scheme = W8A8) -> Work:
    return Work.linear(m, k, n, torch.bfloat16, scheme)


def _estimate(m: int, k: int, n: int) -> Estimate:
    return SYNTHETIC.estimate(_linear_work(m, k, n))


def _synthetic(device: torch.device) -> GpuCost:
    return SYNTHETIC


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


def test_it_warns_once_where_pytorch_has_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cuda_architectures", list)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpu_build._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"runs on CUDA 13\.0, and this qfx was built without"):
        _plan(*_linear(4, 64, 64), qfx.Config(minimum_gain=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _plan(*_linear(4, 64, 64), qfx.Config(minimum_gain=0))


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
         "guard=0.1: linear_guarded has no kernel for cuda"),
        (*_linear(4, 64, 64), {"scheme": "w8a8-groups", "minimum_gain": 0},
         "xs8g64_ws8g64_h64: linear on cuda has groups of weights only, not of "
         "activations"),
        (*_linear(4, 64, 64), {"scheme": qfx.Scheme(w=qfx.QSpec(group=96)), "minimum_gain": 0},
         "xs8r_ws8g96: linear on cuda has groups of multiples of 64"),
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


@pytest.mark.parametrize(("m", "k", "n"), pairs(*MKN))
def test_the_points_of_the_table_are_as_measured(m: int, k: int, n: int) -> None:
    found = _estimate(m, k, n)
    assert found.float_s == pytest.approx(_seconds("float", m, k, n), rel=1e-9)
    expected = _seconds("int8", m, k, n) + _seconds("quantize", m, k)
    assert found.int8_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("m, n", every([3, 100, 5000], [300, 1000, 12288]))
def test_between_the_points_it_lies_between_them(m: int, n: int) -> None:
    """Per unit of work: as little as its cheapest neighbour, as much as its dearest."""
    k = 3000
    around = [
        [p for p in points if q / 64 < p < q * 64] for points, q in zip(MKN, (m, k, n), strict=True)
    ]
    per_unit = [_seconds("float", *p) / (p[0] * p[1] * p[2]) for p in product(*around)]
    found = _estimate(m, k, n).float_s / (m * k * n)
    assert min(per_unit) <= found <= max(per_unit)


def test_beyond_the_last_point_work_costs_what_it_did_there() -> None:
    last = GRIDS["float"].logs(8192, 8192, 16384)
    assert GRIDS["float"].logs(16384, 8192, 32768) == pytest.approx(4 * last)


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
    work = Work("products", 512, 64, 512, torch.bfloat16, 64)
    assert entry.estimate == SYNTHETIC.estimate(work)
    half = SYNTHETIC.estimate(replace(work, m=1024, n=1024, batch=BATCH // 2))
    expected = [_seconds(what, 1024, 64, 1024) / 2 for what in BATCHED]
    assert [half.float_s, half.int8_s] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (W8A8, ("int8", "quantize")),
        (qfx.Scheme(rotation=64), ("int8", "rotated")),
        (qfx.Scheme(x=qfx.QSpec(axes=(0, 1))), ("int8", "tensor")),
        (qfx.Scheme(x=qfx.QSpec(static=True, axes=(0, 1))), ("int8", "static")),
        (qfx.Scheme(x=None), ("weight_only",)),
        (qfx.Scheme(x=None, rotation=64), ("weight_only", "rotate")),
        (qfx.Scheme(x=qfx.QSpec(), w=qfx.QSpec(bits=4, group=64)), ("groups", "quantize")),
    ],
)
def test_a_scheme_is_a_product_and_a_pass(scheme: qfx.Scheme, expected: tuple[str, Any]) -> None:
    assert (form_of(scheme).name, *passes_of(scheme)) == expected


def test_a_rotated_weight_that_trains_costs_its_rotations() -> None:
    rotated = qfx.Scheme(rotation=64)
    plain, turned = (SYNTHETIC.training(_linear_work(256, 1024, 512, s)) for s in (W8A8, rotated))
    turn = GRIDS["rotate"]
    assert plain == pytest.approx(1e-12 * 1024 * (512 + 256))
    assert turned - plain == pytest.approx(3 * turn.logs(512, 1024) + turn.logs(256, 1024))


def _without(*names: str) -> GpuCost:
    raw = raw_table()
    for name in names:
        del _grids(raw)[name]
    return GpuCost.read(json.dumps(raw))


def test_what_the_table_lacks_stays_float_with_the_reason(cuda_build: None) -> None:
    module = nn.Linear(128, 128, dtype=torch.float16)
    plan = _plan(module, torch.ones(8, 128, dtype=torch.float16), qfx.Config(), _synthetic)
    assert _reason(plan).startswith(f"the table of {NAME} has no times of int8 in float16; run")


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("int8", W8A8),
        ("float", W8A8),
        ("quantize", W8A8),
        ("rotated", qfx.Scheme(rotation=64)),
        ("rotate", qfx.Scheme(rotation=64)),  # of its weight, at every call that packs it
        ("weight_only", qfx.Scheme(x=None)),
    ],
)
def test_a_linear_needs_its_product_and_its_passes(name: str, scheme: qfx.Scheme) -> None:
    asked = (form_of(scheme).name, torch.bfloat16, scheme)
    assert SYNTHETIC.lacks(*asked) is None
    reason = f"the table of {NAME} has no times of {name} in bfloat16"
    assert _without(name).lacks(*asked) == reason


@pytest.mark.parametrize("queries", [1, 16])
def test_what_no_table_was_made_for_is_a_reason_on_every_device(queries: int) -> None:
    """A GPU's table is asked as one of a CPU: of attentions none is measured."""
    matches = match(qfx.trace(Attends(), torch.ones(2, queries, 64, dtype=torch.bfloat16)))
    (entry,) = decide(matches, qfx.Config(), SYNTHETIC).entries
    lacking = f"the table of {NAME} has no times of attentions in bfloat16"
    assert (entry.scheme, entry.decodes) == (None, False)
    assert entry.reason == f"an attention: {lacking}"


def test_attentions_without_those_of_one_query() -> None:
    raw = raw_table()
    for name in ("attentions", "float_attentions"):
        _grids(raw)[name] = _grids(raw)["products"]
    x = torch.ones(2, 1, 64, dtype=torch.bfloat16)
    model = GpuCost.read(json.dumps(raw))
    (entry,) = decide(match(qfx.trace(Attends(), x)), qfx.Config(), model).entries
    assert not entry.decodes and entry.reason.startswith("an attention: int8 would be 1.00x")


def _grids(raw: dict[str, Any]) -> dict[str, Any]:
    return raw["tables"]["bfloat16"]["grids"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(schema=0), "a GPU table of schema 0, expected 2"),
        (
            lambda raw: _grids(raw)["int8"]["seconds"].pop(),
            "the grid int8: a table has no list of 4 where",
        ),
        (
            lambda raw: _grids(raw)["rotate"]["seconds"][0].__setitem__(0, 0.0),
            "the grid rotate: a table holds 0.0",
        ),
        (
            lambda raw: _grids(raw).update(rotate=_grids(raw)["int8"]),
            "the grid rotate has 3 axes",
        ),
        (
            lambda raw: raw["tables"]["bfloat16"]["numbers"]["batch"].append(2),
            "no list of 1",
        ),
    ],
)
def test_a_table_that_is_none_is_an_error(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    raw = json.loads(json.dumps(raw_table()))
    change(raw)
    with pytest.raises(ValueError, match=message):
        GpuCost.read(json.dumps(raw))


def test_a_table_is_found_by_its_gpu(tmp_path: Path) -> None:
    (tmp_path / f"{slug(NAME)}.json").write_text(json.dumps(raw_table()))
    assert gpu.model_of(NAME, tmp_path) == SYNTHETIC
    assert gpu.model_of("another", tmp_path) is None
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_the_committed_tables_can_be_read() -> None:
    for path in HERE.glob("*.json"):
        assert slug(GpuCost.read(path.read_text()).name) == path.stem
