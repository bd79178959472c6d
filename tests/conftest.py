"""Fixtures and profiles shared by all tests."""

from __future__ import annotations

import os

# Threads that wait leave the core to the other process of the tests. By default they spin, and
# small operators take ten times as long. Read when torch is loaded, so above what loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import qfx._C as _C
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from qfx.cost import batched, machine, weight_storage
from qfx.cost.batched import ATTENTION_AXES, BMM_AXES, DECODE_AXES, BatchTable
from qfx.cost.chosen import costs_from
from qfx.cost.gpu import cost_of
from qfx.cost.interpolation import Axes, Grid
from qfx.cost.machine import AXES, BLOCK, CostTable, MachineCost, Tables
from qfx.cost.model import CostModel, Costs
from qfx.cost.quantizing import Sweep
from qfx.cost.weight_storage import AXES as STORAGE_AXES
from qfx.cost.weight_storage import StorageTable

THREADS = 2
KEPT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
torch.set_num_threads(THREADS)
settings.register_profile(
    "quick", max_examples=60, deadline=None, derandomize=True, print_blob=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile(
    "long", settings.get_profile("quick"), max_examples=3000, derandomize=False
)
settings.load_profile(os.environ.get("QFX_TEST_PROFILE", "quick"))


@contextmanager
def on_isa(name: str) -> Iterator[None]:
    """Runs the kernels on another instruction set."""
    before = _C.isa()
    _C.set_isa(name)
    try:
        yield
    finally:
        _C.set_isa(before)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(THREADS)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal type, shape and bits, -0 unlike 0; one NaN is as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = torch.int32 if a.element_size() == 4 else torch.int16
    agree = (a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())
    return bool(agree.all())


@pytest.fixture(params=_C.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine."""
    with on_isa(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from the user's cache directory or left in it. In the tests' own one are the
    fixed costs, as if measured: so processes that tests start need not measure either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        _keep_fixed_costs()
        yield


def _keep_fixed_costs() -> None:
    """For those who ask with this machine's instruction set and as many threads as tests use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measure", lambda *_: FIXED_COST)
        patch.setattr(weight_storage, "measure_storage", lambda *_: FIXED_STORAGE_COST)
        patch.setattr(batched, "measure_bmm", lambda *_: FIXED_BMM_COST)
        patch.setattr(batched, "measure_attention", lambda *_: FIXED_ATTENTION_COST)
        patch.setattr(batched, "measure_decode", lambda *_: FIXED_DECODE_COST)
        tables = (machine.table, batched.bmm_table, batched.attention_table, batched.decode_table)
        for of in itertools.product(KEPT_DTYPES, range(1, THREADS + 1), (_C.isa(),)):
            for table in tables:
                table.__wrapped__(*of)
            for name in weight_storage.STORAGES:
                weight_storage.storage_table.__wrapped__(name, *of)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def _grid(per_mac: float, overhead: float, axes: Axes = AXES) -> Grid:
    rows, ks, ns = axes
    return tuple(tuple(tuple(m * k * n * per_mac + overhead for n in ns) for k in ks) for m in rows)


FIXED_COST = CostTable(
    _grid(1e-10, 1e-6),
    _grid(0.4e-10, 5e-6),
    columns=(tuple(range(BLOCK)),) * len(AXES[0]),
    uneven_s=0.0,
    symmetric_saving=0.0,
    static_saving=Sweep(0.0, 0.0),
    static_call_s=0.0,
    pack_s=6e-10,
    again_s=4e-10,
    codes_s=5e-10,
    rotation=Sweep(1e-9, 1e-10),
    turn=Sweep(2e-9, 3e-10),
)
FIXED_STORAGE_COST = StorageTable(
    _grid(1e-10, 1e-6, STORAGE_AXES), _grid(0.5e-10, 5e-6, STORAGE_AXES)
)


def _batches(axes: Axes) -> BatchTable:
    grids = (_grid(1e-10, 1e-6, axes), _grid(2e-10, 5e-6, axes))
    return BatchTable(axes, *grids, float_call_s=1e-6, int8_call_s=5e-6)


FIXED_BMM_COST, FIXED_ATTENTION_COST = _batches(BMM_AXES), _batches(ATTENTION_AXES)
FIXED_DECODE_COST = _batches(DECODE_AXES)


FIXED_TABLES = Tables(
    linears=lambda *machine: FIXED_COST,
    storages=lambda name, *machine: FIXED_STORAGE_COST,
    products=lambda *machine: FIXED_BMM_COST,
    attentions=lambda *machine: FIXED_ATTENTION_COST,
    decodes=lambda *machine: FIXED_DECODE_COST,
)
FIXED_COSTS = Costs(MachineCost(FIXED_TABLES), cost_of)


@pytest.fixture(autouse=True)
def fixed_cost(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiler tests never measure: float takes 2.5 times as long per multiply-accumulate, and half
    as long for products of two activations and attentions."""
    costs = None if "real_cost" in request.keywords else FIXED_COSTS
    with costs_from(costs) if costs else nullcontext():
        yield


UseCosts = Callable[[CostModel], None]


@pytest.fixture
def use_costs(fixed_cost: None) -> Iterator[UseCosts]:
    """Has the rest of the test decide by this cost model."""
    with ExitStack() as stack:
        yield lambda cost: stack.enter_context(costs_from(Costs(cost, cost_of)))


def fixed_tables(**others: Any) -> MachineCost:
    """The fixed cost model with other tables."""
    tables = {name: lambda *machine, of=table: of for name, table in others.items()}
    return MachineCost(FIXED_TABLES._replace(**tables))
