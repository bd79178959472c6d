"""convert: replaces modules that train their quantization by modules to be served, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qfx.host.tensors import has_values
from qfx.nn.binary import BinaryLinear, binary_packed
from qfx.nn.conv import Conv
from qfx.nn.conv_like import matrix_of
from qfx.nn.frozen_state import FrozenState
from qfx.nn.hook_transfer import parametrized
from qfx.nn.learned_steps import LearnedSteps
from qfx.nn.linear import Linear
from qfx.nn.lsq import LSQLinear
from qfx.nn.lsq_conv import LSQConv
from qfx.nn.qat_state import TrainedState
from qfx.nn.replace import replace
from qfx.nn.selection import Selection, blank_module, check_unsharded, refuse
from qfx.nn.sign_linear import SignLinear
from qfx.nn.stored_modules import notify_listeners
from qfx.nn.weight_faults import unserved_bias, unserved_weight
from qfx.ops.code import code_of
from qfx.ops.quantize import SMALLEST_SCALE

ops = torch.ops.qfx


def convert(model: nn.Module) -> nn.Module:
    """Replaces the modules of `prepare_qat` and `prepare_binary` in place by modules to be served,
    and returns the model.

    An `LSQLinear` becomes a `qfx.nn.Linear` of the same scheme, and an `LSQConv` a `qfx.nn.Conv`:
    int8 codes from its learned step, packed once, and the learned step of activations as a static
    scale. A `BinaryLinear` becomes a
    `qfx.nn.SignLinear`. Outputs equal those of the eval mode bit for bit (Q12), except that the
    gates of recurrent modules, whose steps become one operator, round in another way (L1).

        model = qfx.convert(qfx.prepare_qat(model))  # with training in between

    Float weights are freed, unless something else refers to them, such as an optimizer or a tied
    embedding. Biases stay the same parameters. Everything else stays unchanged, including float
    linears, so a second call changes nothing. What is transferred to the new modules, logged,
    warned of and refused is the same as for `quantize_`.

    Raises ValueError, before anything is changed, for a model that contains neither such modules
    nor converted ones, for steps that were never fitted or became infinite in training, and for
    weights, shifts and steps that are NaN.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    trained: dict[str, Any] = {n: m for n, m in modules.items() if isinstance(m, TrainedState)}
    _check_inside(trained, modules)
    check_unsharded(model, "convert")
    missed = {n: why for n, m in trained.items() if (why := _not_converted(m))}
    taken = {n: m for n, m in trained.items() if n not in missed}
    found = Selection("convert", model, trained, taken, {}, missed)
    for kind, how in _DEPLOYED.items():
        of_kind = found._replace(taken={n: m for n, m in taken.items() if type(m) is kind})
        refuse(of_kind, how.blank, "", _faults)
    each = {m: _DEPLOYED[type(m)].made(m) for m in dict.fromkeys(taken.values())}
    if trained:
        replace(found, {name: each[m] for name, m in taken.items()})
        notify_listeners(model)
    return model


def _check_inside(trained: dict[str, Any], modules: dict[str, nn.Module]) -> None:
    if "" in trained:
        raise ValueError(
            f"convert: the model is a {type(trained['']).__name__} itself, which cannot be "
            "replaced: put it into a model first, nn.Sequential(module)"
        )
    if not trained and not any(isinstance(m, Linear | Conv | SignLinear) for m in modules.values()):
        raise ValueError(
            "convert: the model has no LSQLinear, LSQConv or BinaryLinear inside it: prepare_qat "
            "and prepare_binary make them, to be trained; a float model becomes int8 by quantize_"
        )


def _not_converted(module: TrainedState) -> str:
    """Returns why this module cannot be converted; '' if it can."""
    if parametrize.is_parametrized(module):
        return parametrized(module, next(iter(module.parametrizations)))  # type: ignore
    if type(module) not in _DEPLOYED:
        return f"{type(module).__name__}, a subclass of {type(module).__mro__[1].__name__}"
    weight = module._parameters.get("weight")
    return unserved_weight(weight) or unserved_bias(module._parameters.get("bias"), weight)


def _faults(module: TrainedState) -> Iterator[str]:
    """Yields a message for each step, weight or shift that is NaN or infinite."""
    for name in module.steps:
        step = getattr(module, name)
        if step is None or not has_values(step):
            continue
        if step.isnan().any():
            yield (
                f"its {name} is NaN: it was not fitted to data (module.observe(x), or prepare_qat "
                "and prepare_binary with example inputs), or training has diverged"
            )
        elif step.float().exp().isinf().any():
            yield f"its {name} is {float(step.detach().max()):.4g}, and so the step itself infinite"
    for name in ("weight", "shift"):
        values = getattr(module, name)
        if values is not None and has_values(values) and not values.isfinite().all():
            yield f"its {name} holds NaN or infinity: training has diverged"


def _of_lsq(module: LSQLinear) -> Linear:
    """Returns the int8 linear with the learned codes, scales and shift. (Q12)"""
    like: Any = module
    return Linear.from_state(like, _learned(module, module.weight))


def _of_lsq_conv(module: LSQConv) -> Conv:
    """Returns the int8 convolution with the learned codes and scales. (Q12)"""
    return Conv.from_state(module, _learned(module, matrix_of(module.weight, module.views)))


@torch.no_grad()
def _learned(module: LearnedSteps, matrix: Tensor) -> FrozenState:
    """Returns the codes of the weight, as a matrix [N, K], and the scales that were learned."""
    scheme, x_step = module.scheme, module.x_log_step
    codes, scale, _ = ops.quantize(matrix, code_of(scheme.w), _step(module.w_log_step))
    tensors = {"codes": codes, "scale": scale.reshape(-1)} | _shift(module)
    if x_step is not None:
        assert scheme.x is not None
        scheme = changed(scheme, x=changed(scheme.x, static=True))
        tensors["x_scale"] = _step(x_step)
    return FrozenState(scheme, tensors)


@torch.no_grad()
def _of_binary(module: BinaryLinear) -> SignLinear:
    """Returns the 1-bit linear with the learned scales and shift. (H3)"""
    packed, size = binary_packed(module.weight, module.axes)
    x_scale = module.x_log_scale.float().exp()
    tensors = {"scale": x_scale * size, "x_scale": x_scale} | _shift(module)
    return SignLinear.from_packed(module, packed, tensors)


def _step(log_step: Tensor) -> Tensor:
    """Returns the static step whose logarithm is `log_step`, at least 2^-126 as in `quantize`.
    Equation (Q6)."""
    return log_step.float().exp().clamp_min(SMALLEST_SCALE)


def _shift(module: LearnedSteps | BinaryLinear) -> dict[str, Tensor]:
    return {} if module.shift is None else {"shift": module.shift.detach().float().clone()}


class _Deployed(NamedTuple):
    """Two functions for one class of trained modules: `made` converts such a module, `blank`
    creates a module of the resulting class, from a float linear if it is a linear."""

    made: Callable[[Any], nn.Module]
    blank: Callable[[nn.Linear], nn.Module]


_DEPLOYED: dict[Any, _Deployed] = {
    LSQLinear: _Deployed(_of_lsq, Linear.from_float),
    LSQConv: _Deployed(_of_lsq_conv, lambda linear: Conv.from_float(blank_module(True))),
    BinaryLinear: _Deployed(_of_binary, SignLinear.from_float),
}
