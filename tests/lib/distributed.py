"""Training of one model by two processes: ways to distribute the model, and the run of each
process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import qfx
from qfx import PER_TENSOR, QSpec, Recipe, Scheme, SiteRecipe
from qfx.plan.plan import Plan
from qfx.weights.cache import CACHE
from tests.lib.ranks import RANKS

FEATURES, HIDDEN, ROWS = 16, 32, 8  # powers of two: a mean over half the rows is exact
RATE, STEPS = 0.25, 3
OPTIONS = {"minimum_gain": 0, "scheme": "w8a8-asymmetric"}
_data = torch.Generator().manual_seed(1)
X, TARGET = torch.randn(2, ROWS, FEATURES, generator=_data)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Head(nn.Linear):
    """A linear whose forward Dynamo compiles by itself, unlike the forwards of torch.nn."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = Head(FEATURES, FEATURES)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def static_recipe() -> Recipe:
    """Returns a recipe with a factor, rotation and static scale for every linear of a Model."""
    scheme = Scheme(x=QSpec(axes=PER_TENSOR, static=True), rotation=16)
    linears = [(n, m) for n, m in Model().named_modules() if isinstance(m, nn.Linear)]
    return Recipe(
        tuple(
            SiteRecipe(name, 0, m.out_features, k := m.in_features, scheme, (1.5,) * k, 0.03125)
            for name, m in linears
        )
    )


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


# --- ways to distribute a model; each compiles it and returns what to call ---

Options = dict[str, Any]
Call = Callable[[Tensor], Tensor]
Way = Callable[[Model, Options], Call]


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def ddp(model: Model, options: Options) -> Call:
    return torch.compile(DistributedDataParallel(model), **options)


def ddp_outside(model: Model, options: Options) -> Call:
    return DistributedDataParallel(torch.compile(model, **options))


def ddp_buckets(model: Model, options: Options) -> Call:
    """Distributes by DDP with small buckets: DDPOptimizer splits the graph at every layer."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = bucket = 1024
    bucketed = DistributedDataParallel(model, bucket_cap_mb=bucket / 2**20)
    return torch.compile(bucketed, **options)


def fsdp_replicate(model: Model, options: Options) -> Call:
    """Distributes by FSDP's `replicate`, its form of DDP."""
    return torch.compile(replicate(model, mesh=_mesh()), **options)


def fsdp_root(model: Model, options: Options) -> Call:
    """Shards the root. The backward computes the blocks again, as bodies of higher-order
    operators."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return torch.compile(fully_shard(model, mesh=_mesh()), **options)


def fsdp_layers(model: Model, options: Options, reshard: bool = True) -> Call:
    for block in model.blocks:
        fully_shard(block, mesh=_mesh(), reshard_after_forward=reshard)
    return torch.compile(fully_shard(model, mesh=_mesh()), **options)


def fsdp_keeping(model: Model, options: Options) -> Call:
    """Shards layers whose weights stay gathered between forward and backward, and after
    inference."""
    return fsdp_layers(model, options, reshard=False)


def fsdp_compiled_layers(model: Model, options: Options) -> Call:
    """Compiles each layer by itself, then shards it."""
    for layer in (*model.blocks, model.head):
        layer.compile(**options)
        fully_shard(layer, mesh=_mesh())
    return fully_shard(model, mesh=_mesh())


def fsdp_function(model: Model, options: Options) -> Call:
    """Compiles a function that gets the gathered weights as arguments."""
    linear = torch.compile(lambda x, w, b: F.linear(x, w, b), dynamic=False, **options)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_apply, linear, module)
    return fully_shard(model, mesh=_mesh())


def _apply(linear: Callable[..., Tensor], module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def fsdp_from_outside(model: Model, options: Options) -> Call:
    """Compiles a function that also reads a gathered weight of a module that is not running."""
    fully_shard(model, mesh=_mesh())
    register_fsdp_forward_method(model, "features")
    holder = SimpleNamespace(model=model)

    def call(x: Tensor) -> Tensor:
        features, head = holder.model.features(x), holder.model.head
        return F.linear(features, head.weight, head.bias)

    return torch.compile(call, **options)


# --- one run ---


@dataclass
class Run:
    """The record of one rank: full weights and the output in inference, before each step and after
    the last; the losses; for each matmul its name and scheme, or why it has none; how often the
    cache packed."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    plan: dict[str, str] = field(default_factory=dict)
    packs: int = 0


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 found a fault")
    dist.barrier()


def train(way: Way, inner: str, split: bool = True, recipe: Recipe | None = None) -> Run:
    """Runs STEPS steps of SGD on this rank's rows, or on all rows, with inference between the
    steps."""
    rank = dist.get_rank()
    x, target = (t.chunk(RANKS)[rank] if split else t for t in (X, TARGET))
    run, model, packs = Run(), new_model(), CACHE.packs
    options = {"backend": qfx.backend, "options": {**OPTIONS, "inner": inner, "recipe": recipe}}
    with _recorded_plans(run.plan):
        f = way(model, options)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for step in range(STEPS + 1):
            run.weights.append({n: _whole(p) for n, p in model.named_parameters()})
            with torch.no_grad():
                run.outputs.append(f(x))
            if step < STEPS:
                loss = F.mse_loss(f(x), target)
                loss.backward()
                run.losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
    run.packs = CACHE.packs - packs
    return run


def _whole(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().clone()


@contextmanager
def _recorded_plans(found: dict[str, str]) -> Iterator[None]:
    def recorded(plan: Plan, gm: Any) -> None:
        found.update((e.match.name, str(e.scheme or e.reason)) for e in plan.entries)

    with mock.patch("qfx.dynamo_backend.backend._record", recorded):
        yield
