"""Float forms: the functions that int8 modules compute if only their weights are rounded, and
nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qfx.cost.timing import timed
from qfx.host.dynamo import uncompiled_module
from qfx.io.errors import UserError
from qfx.nn import BinaryLinear, Conv, Embedding, Experts, Linear, LSQConv, LSQLinear, SignLinear
from qfx.nn.conv_like import ConvSettings, float_convolution, is_convolution, sized
from qfx.nn.dtypes import output_dtype
from qfx.nn.experts_like import is_experts
from qfx.nn.functional import shifted
from qfx.nn.linear_like import as_linear, embed_scale_of, is_transposed
from qfx.nn.recurrent import Recurrent, float_linear
from qfx.nn.recurrent_like import linears_of_recurrent
from qfx.nn.stacked_weight import StackedWeight
from qfx.report.experts_calls import dequantized, in_float

_CONVS = (Conv, LSQConv)
INT8_MODULES = (Linear, *_CONVS, Embedding, Experts, LSQLinear, BinaryLinear, SignLinear)


def int8_modules(model: nn.Module | None) -> dict[str, nn.Module]:
    """Returns the quantized linears, embeddings and blocks of experts of the model, under each of
    their names."""
    named = () if model is None else model.named_modules(remove_duplicate=False)
    return {
        name: module
        for name, module in named
        if isinstance(module, INT8_MODULES) and getattr(module, "is_quantized", True)
    }


class FloatForm(NamedTuple):
    """A float function that an int8 module is compared with: a linear with `weight` [N, K] or, if
    `lookup`, a lookup in `weight` [V, D]. `shift` [K] is added to x first. `scale` multiplies the
    rows that were looked up."""

    weight: Tensor
    bias: Tensor | None
    shift: Tensor | None
    scale: float | Tensor | None
    lookup: bool

    def to(self, dtype: torch.dtype) -> FloatForm:
        """Returns the same function with weight and bias in `dtype`, in which it then computes."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return self._replace(weight=self.weight.to(dtype), bias=bias)

    def run(self, x: Tensor) -> Tensor:
        """Maps x [..., K] to [..., N], or ids [...] to rows [..., D]."""
        if self.lookup:
            rows = F.embedding(x, self.weight)
            return rows if self.scale is None else rows * self.scale
        return F.linear(shifted(x, self.shift).to(self.weight.dtype), self.weight, self.bias)


class ConvForm(NamedTuple):
    """The float convolution that an int8 one is compared with; `weight` in the shape that the
    module of torch.nn has."""

    weight: Tensor
    bias: Tensor | None
    settings: ConvSettings
    lookup: bool = False

    def to(self, dtype: torch.dtype) -> ConvForm:
        """Returns the same function with weight and bias in `dtype`, in which it then computes."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return self._replace(weight=self.weight.to(dtype), bias=bias)

    def run(self, x: Tensor) -> Tensor:
        """Maps [B, C, *sizes] or [C, *sizes] to what the convolution does."""
        return float_convolution(x.to(self.weight.dtype), self.weight, self.bias, self.settings)


def _conv_form(module: Any) -> ConvForm:
    kernels = module.floats(torch.float32) if isinstance(module, Conv) else module.weight.detach()
    settings = module.settings if isinstance(module, _CONVS) else ConvSettings.of(module)
    return ConvForm(kernels, module.bias, settings).to(torch.float32)


def float_form(module: nn.Module) -> FloatForm | ConvForm:
    """Returns the float32 form of a module: of an int8 module with its dequantized weight, of a
    float linear, convolution or embedding with its own weight."""
    if isinstance(module, _CONVS) or is_convolution(module):
        return _conv_form(module)
    lookup = isinstance(module, nn.Embedding)
    if isinstance(module, Embedding):
        weight = module.floats(torch.float32)
    elif isinstance(module, Linear):
        weight = module.quantized.dequantize(torch.float32)
    else:
        holder: Any = as_linear(module) if is_transposed(module) else module
        weight = holder.weight.detach().to(torch.float32)
    bias: Any = None if lookup else getattr(module, "bias", None)
    shift: Any = getattr(module, "shift", None)
    scale = embed_scale_of(module) if lookup else None
    return FloatForm(weight, bias, shift, scale, lookup).to(torch.float32)


def reference_modules(modules: Mapping[str, nn.Module], reference: Any) -> dict[str, nn.Module]:
    """Returns the module of `reference` for each name in `modules`; nothing if `reference` is None.

    Raises UserError if such a module is missing or has a weight of another shape.
    """
    if reference is None:
        return {}
    if not isinstance(reference, nn.Module):
        kind = type(reference).__name__
        raise UserError(f"explain: reference is a {kind}, expected the float model, an nn.Module")
    known = dict(uncompiled_module(reference).named_modules(remove_duplicate=False))
    known |= linears_of_recurrent(uncompiled_module(reference))
    for name, module in modules.items():
        if isinstance(module, Experts):
            if not (name in known and is_experts(known[name])):
                raise UserError(f"explain: reference has no float experts {name!r}")
            continue
        wanted: list[int] = [module.out_features, module.in_features]  # type: ignore[list-item]
        if isinstance(module, _CONVS):
            wanted = [*module.settings.weight_shape]
        weight: Any = getattr(known.get(name), "weight", None)
        if not isinstance(weight, Tensor):
            raise UserError(
                f"explain: reference has no linear or embedding {name!r}, which the model has in "
                "int8: expected the model as it was before it was quantized"
            )
        shape = [*weight.shape][:: -1 if is_transposed(known[name]) else 1]
        if shape != wanted:
            raise UserError(
                f"explain: {name} of reference has a weight {shape}, that of the model is {wanted}"
            )
    return {name: known[name] for name in modules}


def _float_recurrent(module: Recurrent, dtype: torch.dtype) -> Recurrent:
    """Returns a copy of a recurrent module whose linears are float ones in `dtype`, of which
    PyTorch computes whole layers."""
    made = copy.copy(module)
    vars(made).pop("forward", None)
    forms: dict[str, Any] = {
        name: float_form(child).to(dtype) for name, child in module.named_children()
    }
    made._modules = {
        name: float_linear(nn.Parameter(form.weight, requires_grad=False), form.bias)
        for name, form in forms.items()
    }
    return made


@contextmanager
def computing_in_float(
    modules: Mapping[str, nn.Module], recurrent: Iterable[Recurrent] = ()
) -> Iterator[Callable[[], float]]:
    """Context manager inside which these int8 linears and experts compute with their dequantized
    weights, in the dtype of their input, and `recurrent` modules with those of their linears. (Int8
    embeddings return the same rows anyway.) Weights are dequantized at each call, so that only one
    of them takes memory, or those of a recurrent module. Yields a function that returns how many
    seconds dequantizing has taken."""
    seconds = 0.0

    def of_expert(part: StackedWeight, e: int) -> Tensor:
        nonlocal seconds
        weight, spent = timed(lambda: dequantized(part, e))
        seconds += spent
        return weight

    def of_layers(module: Recurrent, input: Any, hx: Any = None) -> Any:
        nonlocal seconds
        x = input.data if isinstance(input, PackedSequence) else input
        made, spent = timed(lambda: _float_recurrent(module, output_dtype(x)))
        seconds += spent
        return made.forward(input, hx)

    def forward_of(module: nn.Module) -> Callable[..., Any]:
        if isinstance(module, Experts):
            return partial(in_float, module, weight_of=of_expert)

        if isinstance(module, Recurrent):
            return partial(of_layers, module)

        def forward(input: Tensor, output_size: Any = None) -> Tensor:  # as the float module's
            nonlocal seconds
            form, spent = timed(lambda: float_form(module).to(output_dtype(input)))
            seconds += spent
            if isinstance(form, ConvForm) and output_size is not None:
                form = form._replace(settings=sized(form.settings, input, output_size))
            return form.run(input)

        return forward

    with ExitStack() as stack:
        for module in {id(m): m for m in (*modules.values(), *recurrent)}.values():
            if not isinstance(module, nn.Embedding):
                stack.callback(_put_back, module, vars(module).get("forward"))
                vars(module)["forward"] = forward_of(module)
        yield lambda: seconds


def _put_back(module: nn.Module, forward: Any) -> None:
    if forward is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = forward
