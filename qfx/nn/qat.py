"""prepare_qat and prepare_binary: give linears and convolutions learned steps, or linears 1-bit
operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace as changed
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from qfx.nn.binary import BinaryLinear
from qfx.nn.conv_like import is_convolution
from qfx.nn.functional import specs
from qfx.nn.linear_like import as_linear
from qfx.nn.lsq import LSQLinear
from qfx.nn.lsq_conv import LSQConv
from qfx.nn.recurrent_like import pairs_of_linears, why_no_recurrence
from qfx.nn.recurrent_opening import opened_recurrent
from qfx.nn.replace import replace
from qfx.nn.selection import Selection, refuse, select_modules
from qfx.values.config import Config, Configurable
from qfx.values.scheme import PER_TENSOR, Scheme
from qfx.weights.model_restore import unchanged

Learned: TypeAlias = LSQLinear | LSQConv | BinaryLinear


def _check_inputs(who: str, inputs: Sequence[Any]) -> None:
    """Raises TypeError if one of the example inputs is a configuration."""
    for example in inputs:
        if isinstance(example, str | Config | Scheme):
            raise TypeError(
                f"{who}: {str(example)[:60]!r} is no example input of a model; give configurations "
                "by name, config=..."
            )


def prepare_qat(
    model: nn.Module,
    *example_inputs: Any,
    config: Configurable = None,
    shift: bool = False,
    **example_keywords: Any,
) -> nn.Module:
    """Replaces the nn.Linear modules of `model` in place by `LSQLinear`, and the convolutions of
    torch.nn by `LSQConv`, and returns the model.

    Weights and biases stay the same parameters. The steps (`w_log_step`, `x_log_step`) and shifts
    are new parameters, so create the optimizer afterwards: `model.parameters()` contains them.
    Convolutions that `quantize_` leaves float stay float here too. nn.LSTM, nn.GRU and their cells
    become those of `qfx.nn`, with an `LSQLinear` for each of their weights; their steps run one by
    one, until `convert` makes them one operator. With a learned step of activations they stay
    float, with a warning.

        model = qfx.prepare_qat(model, x, config="w8a8")

    `config`: the options `scheme` (a `Scheme`, or the first scheme of a preset; without its
    rotation), `skip` and `only` (patterns of module names) and `backward` have an effect. The
    example inputs are run once in float to fit the steps of activations if the scheme is per
    tensor. The model runs in its current mode, in training mode with dropout. Changes of
    parameters, buffers and random generators by this run are undone, as by `qfx.explain`. `shift`:
    add a learned shift to the input of each linear; convolutions have none.

    What is transferred from a linear to its replacement, logged, warned of and refused is the same
    as for `quantize_`. Also raises ValueError if the scheme is per tensor and there are no example
    inputs, or a linear to be replaced did not run; TypeError for a configuration among the inputs.
    """
    config = Config.of(config)
    _check_inputs("prepare_qat", example_inputs)
    scheme = changed(config.chosen, rotation=0)
    spec, _ = specs(scheme, "prepare_qat")
    has_examples = bool(example_inputs or example_keywords)
    if spec.axes == PER_TENSOR and not has_examples:
        raise ValueError(
            f"prepare_qat: the scheme {scheme} learns the step of activations, which is fitted to "
            "data first: give example inputs, prepare_qat(model, x, ...)"
        )

    def make(module: nn.Module) -> LSQLinear | LSQConv:
        if is_convolution(module):
            return LSQConv(module, scheme)
        return LSQLinear.from_float(as_linear(module), scheme, shift)

    run = partial(model, *example_inputs, **example_keywords) if has_examples else None
    with opened_recurrent(model):
        states = {model.get_submodule(name) for _, name in pairs_of_linears(model)}

        def fault(module: nn.Module) -> str:
            return why_no_recurrence(scheme) if module in states else ""

        found = select_modules(
            model, config, "prepare_qat", convolutions=True, recurrent=True, fault_of_scheme=fault
        )
        with unchanged(model, "prepare_qat"):
            made = _made(found, make, run)
        return replace(found, made)


def prepare_binary(
    model: nn.Module,
    *example_inputs: Any,
    config: Configurable = None,
    shift: bool = False,
    **example_keywords: Any,
) -> nn.Module:
    """Replaces the nn.Linear modules of `model` in place by `BinaryLinear` and returns the model.

        model = qfx.prepare_binary(model, x)

    Works like `prepare_qat`, except that only `skip` and `only` of `config` have an effect, and
    that example inputs are required, since the scale of activations of each layer is fitted to
    them. Raises ValueError without them.
    """
    _check_inputs("prepare_binary", example_inputs)
    if not (example_inputs or example_keywords):
        raise ValueError(
            "prepare_binary: the scales of activations are fitted to data: give example inputs, "
            "prepare_binary(model, x, ...)"
        )
    found = select_modules(model, Config.of(config), "prepare_binary", sums_overflow=False)

    def make(module: nn.Module) -> BinaryLinear:
        return BinaryLinear.from_float(as_linear(module), shift=shift)

    run = partial(model, *example_inputs, **example_keywords)
    with unchanged(model, "prepare_binary"):
        made = _made(found, make, run)
    return replace(found, made)


def _made(
    found: Selection, make: Callable[[nn.Module], Learned], run: Callable[[], Any] | None
) -> dict[str, nn.Module]:
    """Returns the new modules by name. `make` creates one from a float module; `run`, if given,
    runs the model once in float to fit them."""
    refuse(found, make)
    each = {linear: make(linear) for linear in dict.fromkeys(found.taken.values())}
    if run is not None:
        _observe(found, each, run)
    return {name: each[m] for name, m in found.taken.items()}


def _observe(found: Selection, each: Mapping[nn.Module, Learned], run: Callable[[], Any]) -> None:
    """Runs the float model once. Each new module observes the inputs of the linear that it will
    replace."""
    missed = {linear for linear, module in each.items() if module.learns_activations}

    def fit(linear: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        each[linear].observe(inputs[0] if inputs else keywords["input"])
        missed.discard(linear)

    with ExitStack() as hooks, torch.no_grad():
        for linear in each:
            hooks.callback(linear.register_forward_hook(fit, with_kwargs=True).remove)
        run()
    if missed:
        names = sorted(name for name, linear in found.taken.items() if linear in missed)
        raise ValueError(
            f"{found.who}: {', '.join(names)} did not run on the example inputs, so the steps of "
            "their activations are not known; skip them or give other inputs"
        )
