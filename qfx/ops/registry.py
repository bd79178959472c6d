"""Ties an operator's parts together: C++ schema and kernels, reference, fake, gradient.

`REFERENCES[name]` is the definition of `torch.ops.qfx.<name>` in plain torch. A test fails when an
operator lacks one of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import qfx._C  # noqa: F401  (loading the extension registers the operators)

REFERENCES: dict[str, Callable[..., Any]] = {}
FAKES: dict[str, Callable[..., Any]] = {}
NO_GRADIENT: list[str] = []


def reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers the definition of the operator that has the function's name."""
    REFERENCES[function.__name__] = function
    return function


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the shape and dtype function of operator `name`; mixed devices are an error."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            devices = {str(a.device) for a in args if isinstance(a, torch.Tensor)}
            if len(devices) > 1:
                where = " and ".join(sorted(devices))
                raise RuntimeError(f"{name}: operands are on {where}; move all to one device")
            return function(*args)

        torch.library.register_fake(f"qfx::{name}", checked)
        FAKES[name] = function
        return function

    return register


def no_gradient(name: str) -> None:
    """Makes `backward` through operator `name` an error sentence instead of a silent None."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"qfx::{name} is an inference operator and has no gradient. Run it under "
            "torch.no_grad(), or leave the matmul in float where gradients are needed, as the qfx "
            "backend does by itself."
        )

    torch.library.register_autograd(f"qfx::{name}", backward)
    NO_GRADIENT.append(name)
