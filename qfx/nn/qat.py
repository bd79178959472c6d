"""prepare_qat and prepare_binary: a model's linears get learned steps, or 1-bit operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace as changed
from typing import Any

import torch
from torch import nn

from qfx.config import Config
from qfx.nn.binary import BinaryLinear
from qfx.nn.functional import specs
from qfx.nn.lsq import LSQLinear
from qfx.nn.replace import chosen, replace
from qfx.scheme import PER_TENSOR


def prepare_qat(
    model: nn.Module,
    *example_inputs: Any,
    config: Config | None = None,
    shift: bool = False,
    **example_keywords: Any,
) -> nn.Module:
    """Replaces the nn.Linear modules of `model` in place by `LSQLinear` and returns the model.

    Weights and biases stay the same parameters; new ones are the steps (`w_log_step`,
    `x_log_step`) and shifts, so make the optimizer afterwards: `model.parameters()` has them.
    `config`: `scheme` (a `Scheme`, or the first of a preset; without its rotation), `skip` and
    `only` (patterns of module names), `backward`. The example inputs are run once in float, to fit
    the steps of activations where the scheme is per tensor. Raises ValueError without them in that
    case, for a pattern that fits nothing, and where a linear to be replaced did not run.
    """
    config = config or Config()
    scheme = changed(config.chosen, rotation=0)
    spec, _ = specs(scheme, "prepare_qat")
    linears = chosen(model, config, "prepare_qat")
    given = bool(example_inputs or example_keywords)
    if spec.axes == PER_TENSOR and not given:
        raise ValueError(
            f"prepare_qat: the scheme {scheme} learns the step of activations, which is fitted to "
            "data first: give example inputs, prepare_qat(model, x, ...)"
        )
    each = {linear: LSQLinear.from_float(linear, scheme, shift) for linear in linears.values()}
    made = {name: each[linear] for name, linear in linears.items()}
    if given:
        observe(model, made, lambda: model(*example_inputs, **example_keywords), "prepare_qat")
    return replace(model, made)


def prepare_binary(
    model: nn.Module,
    *example_inputs: Any,
    config: Config | None = None,
    shift: bool = False,
    **example_keywords: Any,
) -> nn.Module:
    """Replaces the nn.Linear modules of `model` in place by `BinaryLinear` and returns the model.

    As `prepare_qat`, but of `config` only `skip` and `only` count, and example inputs are needed:
    they give each layer the scale of its activations.
    """
    if not (example_inputs or example_keywords):
        raise ValueError(
            "prepare_binary: the scales of activations are fitted to data: give example inputs, "
            "prepare_binary(model, x, ...)"
        )
    linears = chosen(model, config or Config(), "prepare_binary")
    each = {linear: BinaryLinear.from_float(linear, shift=shift) for linear in linears.values()}
    made = {name: each[linear] for name, linear in linears.items()}
    observe(model, made, lambda: model(*example_inputs, **example_keywords), "prepare_binary")
    return replace(model, made)


def observe(
    model: nn.Module,
    made: Mapping[str, LSQLinear | BinaryLinear],
    run: Callable[[], Any],
    who: str,
) -> None:
    """Runs the float model once; each of `made` sees what the linear of its name sees."""
    missed = {module for module in made.values() if module.learns_activations}

    def hook(module: LSQLinear | BinaryLinear) -> Callable[..., None]:
        def fit(linear: nn.Module, inputs: Any, output: Any) -> None:
            module.observe(inputs[0])
            missed.discard(module)

        return fit

    with ExitStack() as hooks, torch.no_grad():
        for name, module in made.items():
            handle = model.get_submodule(name).register_forward_hook(hook(module))
            hooks.callback(handle.remove)
        run()
    if missed:
        names = sorted(name for name, module in made.items() if module in missed)
        raise ValueError(
            f"{who}: {', '.join(names)} did not run on the example inputs, so the steps of their "
            "activations are not known; skip them or give other inputs"
        )
