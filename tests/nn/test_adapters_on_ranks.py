"""Adapters on an int8 base with int8 gradients and activations saved in int8, and losses in chunks,
by two processes: DDP and FSDP2 average what a single process computes on all rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import qfx
from qfx.nn.deferred_logits import DeferredLogits
from tests.lib.ranks import RANKS, Ranks

X = torch.randn(64 * RANKS, 128, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    processes = Ranks()
    yield processes
    processes.stop()


def model(backward: str) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 128))
    base = qfx.quantize_(net, qfx.Config(backward=backward))
    made = get_peft_model(base, LoraConfig(r=8, target_modules=["0", "2"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # zeros, behind which nothing has a gradient
            nn.init.normal_(parameter, std=0.05)
    return made


def gradients(made: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in made.named_parameters():
        grad: Any = parameter.grad
        if grad is not None:
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name.removeprefix("module.")] = whole.clone()
    return found


def of_a_rank(way: str) -> dict[str, Tensor]:
    """Runs on each rank, with its rows."""
    rank = torch.distributed.get_rank()
    made = model("int8")
    if way == "ddp":
        made = DistributedDataParallel(made)
    else:
        fully_shard(made, mesh=init_device_mesh("cpu", (RANKS,)))
    torch.manual_seed(rank)
    with qfx.save_in_int8():
        y = made(X.chunk(RANKS)[rank])
    y.square().mean().backward()
    return gradients(made)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_gradients_are_those_of_one_process(ranks: Ranks, way: str) -> None:
    exact = model("float")
    exact(X).square().mean().backward()
    expected = gradients(exact)
    first, *others = ranks.run(of_a_rank, way)
    assert len(first) == 4 and first.keys() == expected.keys()
    for name, grad in first.items():
        assert all(torch.equal(each[name], grad) for each in others)
        assert torch.cosine_similarity(grad.ravel(), expected[name].ravel(), 0) > 0.99
        assert not torch.equal(grad, expected[name])


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(128, 16), nn.Linear(16, 500)
        self.deferred = False

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.body(x))
        self.deferred = isinstance(logits, DeferredLogits)
        return F.cross_entropy(logits, torch.arange(len(x)))


def loss_of_a_rank(way: str) -> tuple[dict[str, Tensor], bool]:
    made: Any = Classifier()
    inner, rows = made, X.chunk(RANKS)[torch.distributed.get_rank()]
    if way == "ddp":
        made = DistributedDataParallel(made)
        with qfx.chunked_loss(made):
            made(rows).backward()
    else:
        fully_shard(made.head, mesh=init_device_mesh("cpu", (RANKS,)))
        with pytest.warns(UserWarning, match="FSDP shards"), qfx.chunked_loss(made):
            made(rows).backward()
    return gradients(made), inner.deferred


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_losses_in_chunks(ranks: Ranks, way: str) -> None:
    """Under DDP; FSDP has the logits, and says so."""
    exact = Classifier()
    torch.stack([exact(rows) for rows in X.chunk(RANKS)]).mean().backward()
    expected = gradients(exact)
    for found, deferred in ranks.run(loss_of_a_rank, way):
        assert deferred == (way == "ddp") and found.keys() == expected.keys()
        for name in ("head.weight", *(["body.weight"] if way == "ddp" else [])):
            assert torch.allclose(found[name], expected[name], atol=1e-6)
