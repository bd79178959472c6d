"""Applies tensor-parallel plans of transformers to int8 modules, after these were loaded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    RowwiseParallel,
    TensorParallelLayer,
)

from qfx.host.tensors import is_distributed
from qfx.io.errors import UserError, printable
from qfx.nn.linear import Linear
from qfx.nn.quantized_weight import QuantizedWeight


class LaterPlan:
    """The part of a tensor-parallel plan (`tp_plan`) that is deferred until the int8 modules are in
    place.

    Between `install` and `remove` the parallel styles of transformers skip these modules and treat
    all others as usual. `apply` gives an int8 linear the style of the module that it replaces.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = WeakSet(modules)  # weak: a failed load leaves the styles installed
        self.deferred: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()
        self.whole_linears: list[str] = []
        self.float_linears: list[str] = []

    def install(self) -> None:
        """Replaces the parallel styles of transformers by styles that skip these modules, if there
        is more than one process."""
        if dist.is_available() and dist.is_initialized():
            for name, style in [*ALL_PARALLEL_STYLES.items()]:
                ALL_PARALLEL_STYLES[name] = _Later(getattr(style, "style", style), self)

    def remove(self) -> None:
        """Restores the parallel styles of transformers. Warns about linears that are not split or
        that compute in float."""
        for name, style in [*ALL_PARALLEL_STYLES.items()]:
            if isinstance(style, _Later):
                del ALL_PARALLEL_STYLES[name]
        cut = "within groups or rotated blocks of columns"
        _warn(self.whole_linears, f"are whole on each rank, as the plan cuts their weights {cut}")
        _warn(self.float_linears, "compute in float, as int8 weights are not cut as the plan says")

    def leave(self, module: nn.Module) -> None:
        """Splits a module that stays float as the plan says."""
        if module in self.deferred:
            style, mesh = self.deferred.pop(module)
            for name, parameter in module.named_parameters(recurse=False):
                if not is_distributed(parameter):
                    style.shard_param(module, name, mesh)
            style.install_forward(module, mesh)

    def refuse(self, module: nn.Module, name: str) -> None:
        """Raises UserError if the plan splits `module`, which int8 experts replace."""
        if module in self.deferred:
            raise UserError(
                f"from_pretrained: {printable(name)} has int8 experts, and a tensor-parallel plan "
                "shares them out among ranks, which int8 experts are not: load without a plan, or "
                "quantize the model with skip=['experts']"
            )

    def apply(self, before: nn.Module, made: nn.Module, name: str) -> None:
        """Splits the weight of `made`, which replaces the module `before`, as the plan says.
        Modules other than linears stay whole. `name`: the name of the module, for warnings."""
        if before not in self.deferred or not isinstance(made, Linear):
            return
        style, mesh = self.deferred[before]
        whole = dict(made._parameters)
        for parameter in ("weight", "bias"):
            style.shard_param(made, parameter, mesh)
        weight: Any = made.weight
        local = weight.to_local() if is_distributed(weight) else weight
        stays_int8 = type(local) is QuantizedWeight
        if isinstance(style, RowwiseParallel):
            style = (_Rowwise if stays_int8 else _Whole)(
                input_layouts=style.input_layouts,
                output_layouts=style.output_layouts,
                use_local_output=style.use_local_output,
            )
            if not stays_int8:
                made._parameters.update(whole)
                self.whole_linears.append(name)
        elif not stays_int8:
            self.float_linears.append(name)
        if "config" in vars(before):  # a style of transformers reads it
            made.config = before.config  # type: ignore[assignment]
        made.is_parted = True
        style.install_forward(made, mesh)


def _warn(linears: list[str], what: str) -> None:
    if linears:
        few = printable(", ".join(linears[:3]))
        warnings.warn(f"qfx: {len(linears)} linears ({few}, ...) {what}", stacklevel=3)


def whole(linear: nn.Module) -> nn.Module:
    """Returns the linear, or a copy with the whole weight if its weight is split across ranks
    because it is tied to another weight."""
    weight: Any = linear.weight
    return with_weight(linear, weight.full_tensor()) if is_distributed(weight) else linear


def with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    """Returns a copy of the module with this weight and the same bias."""
    made = copy.copy(module)
    made._parameters = {**module._parameters, "weight": nn.Parameter(weight, False)}
    return made


def gathered(model: nn.Module) -> AbstractContextManager[None]:
    """Makes int8 linears that are split across ranks whole inside the `with` block."""
    if not any(is_distributed(parameter) for parameter in model.parameters()):
        return nullcontext()
    from qfx.nn.gathered_weight import gathered_linears  # imports PyTorch's distributed tensors

    return gathered_linears(model)


class _Later(TensorParallelLayer):  # type: ignore[misc]
    """A parallel style of transformers (the way in which a tensor-parallel plan splits a module)
    that skips the modules of `plan`: they are split later, by `LaterPlan.apply`."""

    def __init__(self, style: Any, plan: LaterPlan) -> None:
        self.style, self.plan = style, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.style, name)

    def validate_param(self, module: Any, *args: Any, **kwargs: Any) -> None:
        if module not in self.plan.modules:
            self.style.validate_param(module, *args, **kwargs)

    def shard_param(self, module: Any, *args: Any) -> None:
        if module not in self.plan.modules:
            self.style.shard_param(module, *args)

    def install_forward(self, module: Any, mesh: Any) -> Any:
        if module not in self.plan.modules:
            return self.style.install_forward(module, mesh)
        self.plan.deferred[module] = self.style, mesh
        return module


class _Rowwise(RowwiseParallel):  # type: ignore[misc]
    """A row-wise parallel style for int8 linears, which take distributed tensors and add the sums
    of the ranks themselves."""

    def should_use_local_tensors(self, module: Any) -> bool:
        return False


class _Whole(_Rowwise):
    """A row-wise parallel style for weights that cannot be split: each rank has the whole weight
    and gathers all columns of x."""

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        (x, *rest), kwargs = super().transform_inputs_pre_forward(module, args, kwargs, mesh)
        return (x.full_tensor(), *rest), kwargs

    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        whole = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
        return super().transform_output_post_forward(module, whole, mesh)
