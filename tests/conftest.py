"""Fixtures and profiles shared by all tests."""

from __future__ import annotations

import logging
import os

# Threads that wait leave the core to the other process of the tests. By default they spin, and
# small operators take up to ten times as long. Read when torch is loaded, so above what loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import qfx._C as _C
from qfx.cost import kernels
from qfx.cost.device_models import costs_from
from qfx.cost.disk import TABLES
from qfx.cost.gpu import cost_of
from qfx.cost.kernel_parameters import KernelParameters
from qfx.cost.model import CostModel, Costs
from qfx.cost.table_file import TableFile
from qfx.cost.workloads import KINDS
from qfx.io.disk_memo import is_switch
from qfx.rewriting import verify as verifying
from qfx.values.limits import FLOATS
from tests.lib.costs import FIXED, FIXED_COSTS, known

THREADS = 2
collect_ignore = ["served"]  # needs vLLM, which is not installed: make vllm
logging.getLogger(verifying.__name__).setLevel(logging.DEBUG)  # every rewritten graph is checked
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
        for name in filter(is_switch, [*os.environ]):
            patch.delenv(name)
        _keep_fixed_costs()
        yield


def _keep_fixed_costs() -> None:
    """For those who ask with this machine's instruction set and as many threads as tests use."""
    isa, defaults = _C.isa(), _C.default_tuning(_C.isa())
    for threads in range(1, THREADS + 1):
        kernels.kept(isa, threads, lambda: KernelParameters(defaults, dict.fromkeys(defaults, 0.0)))
        for kind, dtype in itertools.product(KINDS, FLOATS):
            TABLES.put(TableFile(kind, (dtype, threads, isa)), known(FIXED[kind]))


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
