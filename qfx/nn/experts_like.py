"""Recognizes blocks of experts, as those of transformers, and says why one of them stays float.

A block has the weights of all experts in two parameters and a method that makes a gate of the
outputs of the first. Nothing is imported from transformers: a block is known by its attributes, and
its gate by what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from qfx.host.gpu_build import has_kernel
from qfx.nn.weight_faults import too_long, unquantizable, unserved_weight
from qfx.ops.expert_gates import ExpertGate, gate_like
from qfx.values.limits import why_few_features
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, Scheme
from qfx.weights.offload import drop_file_pages

_UPS = ("gate_up_proj", "up_proj")
FLOAT_NAMES = (*_UPS, "down_proj")  # of the parameters that int8 experts do not have
_GATE, _PARALLEL = "_apply_gate", "_is_expert_parallel"  # transformers' names
_INTERFACE = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", _GATE, _PARALLEL)


class FloatProduct(NamedTuple):
    """One product of all experts in float: the parameter `name` of `module`, and the biases [E, N]
    or None."""

    module: nn.Module
    name: str
    bias: nn.Parameter | None

    @property
    def parameter(self) -> Tensor:
        """The weights, [E, N, K] or [E, K, N]."""
        found = self.module._parameters[self.name]
        assert found is not None
        return found

    @property
    def is_transposed(self) -> bool:
        """Whether the parameter is [E, K, N]."""
        return bool(getattr(self.module, "is_transposed", False))

    @property
    def weights(self) -> Tensor:
        """The weights [E, N, K], a view of the parameter."""
        weights = self.parameter.detach()
        return weights.transpose(1, 2) if self.is_transposed else weights


def is_experts(module: nn.Module) -> bool:
    """Whether `module` has the float weights of experts in two parameters of three dimensions."""
    has_up = any(_is_stack(module, name) for name in _UPS)
    return has_up and _is_stack(module, "down_proj")


def products_of(module: nn.Module) -> tuple[FloatProduct, FloatProduct]:
    """Returns the two products of a block of experts, in the order in which they are computed."""
    up = next(name for name in _UPS if _is_stack(module, name))
    first, last = (
        FloatProduct(module, name, module._parameters.get(f"{name}_bias"))
        for name in (up, "down_proj")
    )
    return first, last


def shape_text(module: nn.Module) -> str:
    """Returns the number of experts and K and N of both products, for logs."""
    shapes = [product.weights.shape for product in products_of(module)]
    return f"{shapes[0][0]} of " + ", ".join(f"{k}x{n}" for _, n, k in shapes)


def why_not_experts(module: nn.Module) -> str:
    """Returns why `qfx.nn.Experts` cannot replace a block of experts, with the number of its
    weights; '' if it can. Does not read the weights."""
    why = next(_reasons(module), "")
    return f"{why}; it has {_count(module):,} weights" if why else ""


def why_not_by_scheme(module: nn.Module, scheme: Scheme) -> str:
    """Returns why experts are not quantized by `scheme`, with the number of weights of `module`; ''
    if they can be."""
    return with_count(module, why_no_experts_scheme(scheme))


def with_count(module: nn.Module, why: str) -> str:
    """Returns the reason why a block stays float with the number of its weights; '' without a
    reason."""
    return f"{why}; it has {_count(module):,} weights" if why else ""


def why_adapted(module: nn.Module, around: nn.Module | None) -> str:
    """Returns why experts stay float whose parameter the module `around` them changes at each call,
    as the wrapper of PEFT's `target_parameters` does; '' if it does not."""
    name = getattr(around, "parameter_name", None)
    inside = getattr(around, "base_layer", None)
    if not is_experts(module) or inside is not module or not isinstance(name, str):
        return ""
    return (
        f"{type(around).__name__} adds an adapter to its {name} at each call: merge the adapter "
        f"first, merge_and_unload(); it has {_count(module):,} weights"
    )


def why_no_experts_scheme(scheme: Scheme) -> str:
    """Returns why experts are not quantized by `scheme`; '' if they can be."""
    x, end = scheme.x, "and experts have no operator for them"
    if x is None:
        return f"{scheme} has float activations, {end}"
    if x.static:
        return f"{scheme} has static scales, {end}"
    if x.axes == PER_TENSOR and not x.group:
        return f"{scheme} has one scale for all tokens, and tokens go to several experts"
    if scheme.w.axes == PER_COLUMN:
        return f"{scheme} has factors of columns, {end}"
    return ""


def experts_fault(module: nn.Module) -> str:
    """Returns what is wrong with the values of the weights, or ''. Reads them, one expert after the
    other."""
    for product in products_of(module):
        for weight in product.weights:
            if why := unquantizable(weight):
                return f"{why}; it has {_count(module):,} weights"
        drop_file_pages(product.parameter)
    return ""


def gate_of(module: Any) -> ExpertGate | None:
    """Returns what a block computes between its products, found by trying it on values, with the
    limits that it has as attributes; None if no arguments of `experts` compute the same. (X2)"""
    numbers = [v for name, v in vars(module).items() if "limit" in name]
    limits = [float(v) for v in numbers if isinstance(v, int | float)]
    between = getattr(module, _GATE) if module.has_gate else module.act_fn
    return gate_like(between, module.has_gate, limits)


def _is_stack(module: nn.Module, name: str) -> bool:
    parameter = _parameter(module, name)
    return parameter is not None and parameter.ndim == 3 and parameter.is_floating_point()


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Returns the parameter of this name, also of a module of TorchScript, or None."""
    found = getattr(module, name, None)
    return found if isinstance(found, nn.Parameter) else None


def _count(module: nn.Module) -> int:
    return sum(product.parameter.numel() for product in products_of(module))


def _reasons(module: Any) -> Iterator[str]:
    kind = type(module).__name__
    if not all(hasattr(module, name) for name in _INTERFACE):
        yield f"{kind} has experts but not the attributes that say what they compute"
        return
    if module.has_post_expert_norm:
        yield f"{kind} has a norm after each expert"
    if getattr(module, _PARALLEL):
        yield f"{kind} has only some of the experts, others are on other ranks"
    products = products_of(module)
    known = {name for p in products for name in (p.name, f"{p.name}_bias")}
    if more := {*module._parameters} - known:
        yield f"{kind} has a parameter {min(more)}, which the operator does not compute with"
    yield from _of_products(products, module)
    try:
        found = gate_of(module)
    except Exception as why:  # of code that qfx does not know
        yield f"the gate of {kind} could not be tried: {why!r}"
        return
    if found is None:
        yield f"{kind} has a gate or an activation that the operator does not have"


def _of_products(products: tuple[FloatProduct, FloatProduct], module: Any) -> Iterator[str]:
    up, down = (product.weights for product in products)
    for product, w in zip(products, (up, down), strict=True):
        if why := unserved_weight(w) or ("" if w.numel() else f"its {product.name} is empty"):
            yield why
            return
        if w.device.type != "meta" and not has_kernel("experts", w.device):
            yield f"its {product.name} is on {w.device}, where experts have no kernel"
        if few := too_long(w[0]) or why_few_features(w.shape[2]):
            yield few
        bias = product.bias
        if module.has_bias and (bias is None or bias.shape != w.shape[:2]):
            yield f"its {product.name}_bias is not [E, N]"
    inner = down.shape[2] * (2 if module.has_gate else 1)
    if up.shape[1] != inner or up.shape[0] != down.shape[0]:
        yield f"its weights {list(up.shape)} and {list(down.shape)} do not fit each other"
