"""Registers hooks on the steps of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def after_each_step(act: Callable[[Iterable[Tensor]], None]) -> None:
    """Makes each step of any optimizer of the process call `act` afterwards, with the parameters
    that may have changed. Edits global state: PyTorch's list of such hooks. Steps of fused
    optimizers would otherwise go unnoticed, because they change weights without increasing their
    version."""

    def stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        act(p for p in parameters if p.requires_grad or p.grad is not None)

    register_optimizer_step_post_hook(stepped)


def before_each_step(act: Callable[[torch.optim.Optimizer], None]) -> None:
    """Makes each step of any optimizer of the process call `act` with the optimizer before the
    step, when gradients exist. Edits global state: PyTorch's list of such hooks. An optimizer that
    trains nothing but biases would otherwise go unnoticed."""

    def steps(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        act(optimizer)

    register_optimizer_step_pre_hook(steps)
