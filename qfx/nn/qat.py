"""prepare_qat: a model's linears get learned quantization steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qfx.config import Config
from qfx.nn.functional import specs
from qfx.nn.lsq import LSQLinear
from qfx.plan import check_names, fits
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
    scheme = replace(config.schemes[0], rotation=0)
    spec, _ = specs(scheme, "prepare_qat")
    chosen = _chosen(model, config)
    given = bool(example_inputs or example_keywords)
    if spec.axes == PER_TENSOR and not given:
        raise ValueError(
            f"prepare_qat: the scheme {scheme} learns the step of activations, which is fitted to "
            "data first: give example inputs, prepare_qat(model, x, ...)"
        )
    made = {name: LSQLinear.from_float(module, scheme, shift) for name, module in chosen.items()}
    if given:
        _observe(model, made, lambda: model(*example_inputs, **example_keywords))
    for name, module in made.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module)
    return model


def _chosen(model: nn.Module, config: Config) -> dict[str, nn.Linear]:
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n}
    check_names(config, linears)
    if not linears:
        raise ValueError("prepare_qat: the model has no nn.Linear inside it")
    return {
        name: module
        for name, module in linears.items()
        if not any(fits(p, [name]) for p in config.skip)
        and (not config.only or any(fits(p, [name]) for p in config.only))
    }


def _observe(model: nn.Module, made: dict[str, LSQLinear], run: Callable[[], Any]) -> None:
    missed = set(made)

    def hook(name: str) -> Callable[..., None]:
        def observe(module: nn.Module, inputs: Any, output: Any) -> None:
            made[name].observe(inputs[0])
            missed.discard(name)

        return observe

    with ExitStack() as hooks, torch.no_grad():
        for name in made:
            handle = model.get_submodule(name).register_forward_hook(hook(name))
            hooks.callback(handle.remove)
        run()
    learned = [n for n in missed if made[n].x_log_step is not None]
    if learned:
        raise ValueError(
            f"prepare_qat: {', '.join(sorted(learned))} did not run on the example inputs, so the "
            "steps of their activations are not known; skip them or give other inputs"
        )
