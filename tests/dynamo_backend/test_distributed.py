"""DDP and FSDP: every step that two processes take is one that a single process takes from the same
weights on all rows, up to roundings; and inference between the steps sees the weights of its time.

Activations have one scale per row, so a row's int8 forward does not depend on who else is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops import REFERENCES
from tests.lib import distributed as d
from tests.lib.bounds import U32
from tests.lib.models import compiled, int8_by_hand
from tests.lib.ranks import RANKS, Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    processes = Ranks()
    yield processes
    processes.stop()


# --- how far roundings can take a step ---

# A gradient is a sum over paths from the loss to a weight. The int8 forward has the same bits
# everywhere, so evaluations differ in the order of float additions only. On a path lie the loss (4
# operations), for each linear a sum of at most HIDDEN products and a residual's, for the weight's
# own gradient one of ROWS products, and the sum over ranks. Each evaluation is within
# (1 + u)^n - 1 <= 1.01 n u of every path's product, n its operations (Higham, 2002, section 3.1).
LINEARS = 5
ROUNDINGS = 4 + LINEARS * (d.HIDDEN + 2) + d.ROWS + 2
# A mean of squares cancels nothing: differences, squares, their sum, the division, ranks.
LOSS_ROUNDINGS = d.ROWS * d.FEATURES + 5


class _Paths(torch.autograd.Function):
    """The int8 linear; its backward is (T1) with every factor replaced by its absolute value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        values = REFERENCES["fake_quantize"]
        ctx.save_for_backward(values(x, [1], 8, False, x.dtype), values(w, [1], 8, True, w.dtype))
        return int8_by_hand(x, w, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, w = ctx.saved_tensors
        return g @ w.abs(), g.T @ x.abs(), g.sum(0)


def _sums_of_paths(model: d.Model) -> dict[str, Tensor]:
    """For each gradient the sum of the absolute values of its paths' products."""
    with mock.patch("torch.nn.functional.linear", _Paths.apply):
        y = model(d.X)
    y.backward(2 * (y - d.TARGET).abs().detach() / y.numel())
    return _gradients(model)


def _gradients(model: d.Model) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


class OneProcess:
    """A single process that takes the weights of any step."""

    def __init__(self, **options: Any) -> None:
        self.model = d.new_model()
        self.compiled = compiled(self.model, **options)

    def check_inference(self, runs: list[d.Run], step: int) -> None:
        """The rows have the bits that this process computes from these weights."""
        self.model.load_state_dict(runs[0].weights[step])
        with torch.no_grad():
            expected = self.compiled(d.X)
        found = torch.cat([run.outputs[step] for run in runs])
        assert found.equal(expected), f"step {step}: {(found - expected).abs().max()} apart"

    def check_step(self, runs: list[d.Run], step: int) -> None:
        """Loss and next weights are those of this process if it starts from these weights."""
        self.model.load_state_dict(runs[0].weights[step])
        loss = F.mse_loss(self.compiled(d.X), d.TARGET)
        loss.backward()
        gradients, paths = _gradients(self.model), _sums_of_paths(self.model)
        found = sum(run.losses[step] for run in runs) / RANKS
        assert abs(found - loss.item()) <= 2 * LOSS_ROUNDINGS * U32 * loss.item()
        for name, now in runs[0].weights[step].items():
            expected = now - d.RATE * gradients[name]
            error = d.RATE * 2.02 * ROUNDINGS * U32 * paths[name]
            error += 2 * U32 * (now.abs() + d.RATE * paths[name])  # of the update itself
            after = runs[0].weights[step + 1][name]
            assert ((after - expected).abs() <= error).all(), f"{name} after step {step}"
            assert ((after - now).abs() > error).any(), f"{name} did not move in step {step}"


WAYS = [
    (d.ddp, "aot_eager"),
    (d.ddp_outside, "aot_eager"),
    (d.ddp_buckets, "aot_eager"),
    (d.ddp_buckets, "inductor"),
    (d.fsdp_root, "aot_eager"),
    (d.fsdp_layers, "aot_eager"),
    (d.fsdp_layers, "inductor"),
    (d.fsdp_keeping, "aot_eager"),
    (d.fsdp_compiled_layers, "aot_eager"),
    (d.fsdp_function, "aot_eager"),
    (d.fsdp_from_outside, "aot_eager"),
    (d.fsdp_replicate, "aot_eager"),
]


@pytest.mark.parametrize(("way", "inner"), WAYS, ids=lambda v: getattr(v, "__name__", v))
def test_two_processes_train_as_one(way: d.Way, inner: str, ranks: Ranks) -> None:
    runs = ranks.run(d.train, way, inner)
    for run in runs:
        assert set(run.plan.values()) == {"xa8r_ws8r"}
        # of weights that FSDP gathers nothing is kept, of others it is packed anew after each step
        assert run.packs == (0 if way.__name__.startswith("fsdp") else LINEARS * (d.STEPS + 1))
        for name, weight in run.weights[-1].items():
            assert weight.equal(runs[0].weights[-1][name]), f"{name} differs between the ranks"
    one = OneProcess()
    for step in range(d.STEPS + 1):
        one.check_inference(runs, step)
    for step in range(d.STEPS):
        one.check_step(runs, step)


@pytest.mark.parametrize("way", [d.ddp, d.ddp_outside], ids=lambda way: way.__name__)
def test_two_processes_follow_one_recipe(way: d.Way, ranks: Ranks) -> None:
    """Inference has the bits of a single process; weights move, and alike on both ranks."""
    recipe = d.static_recipe()
    runs = ranks.run(d.train, way, "aot_eager", True, recipe)
    for run in runs:
        assert run.plan == {site.name: str(site.scheme) for site in recipe.sites}
        for name, weight in run.weights[-1].items():
            assert weight.equal(runs[0].weights[-1][name]), f"{name} differs between the ranks"
            assert not weight.equal(run.weights[0][name]), f"{name} did not move"
    one = OneProcess(recipe=recipe)
    for step in range(d.STEPS + 1):
        one.check_inference(runs, step)


def test_a_fault_on_one_rank_is_reported_while_the_other_waits(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed(.|\n)*rank 1 found a fault"):
        ranks.run(d.fail_on_rank_1)
