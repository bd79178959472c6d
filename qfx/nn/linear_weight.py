"""LinearWeight: the quantized weight of a module, as the module's attributes show it and as PyTorch
moves, casts and replaces it."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from qfx.host.subclasses import as_parameter
from qfx.host.tensors import is_distributed
from qfx.nn.linear_state import LinearState
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.values.config import Config
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe


def _of_weight(name: str, doc: str) -> Any:
    of, last = attrgetter(name), name.rpartition(".")[2]

    def get(module: LinearWeight) -> Any:
        return of(module.quantized)

    def put(module: LinearWeight, value: Any) -> None:
        raise AttributeError(
            f"{last!r} of {module} is part of its weight, and is not replaced by itself: "
            "model.load_state_dict takes codes, and torch.func.functional_call parameters, "
            "dict(model.named_parameters())"
        )

    return property(get, put, doc=doc)


class LinearWeight(LinearState):
    """The part of `qfx.nn.Linear` and `qfx.nn.Conv` that holds the weight, a parameter [N, K]."""

    @property
    def scheme(self) -> Scheme:
        """The scheme of weight and input, with the rotation in use."""
        return self.quantized.scheme

    @property
    def token(self) -> str:
        """The scheme as a string."""
        return str(self.scheme)

    packed = _of_weight("packed", "The packed weight: bytes as the kernels read them.")
    factor = _of_weight("factor", "float32 [K], which multiplies x, where the scheme has one.")
    x_scale = _of_weight("x_scale", "float32 [1], of activations with a static scale.")
    x_zero_point = _of_weight("x_zero_point", "int32 [1], of activations with a static scale.")
    shift = _of_weight("shift", "float32 [K], learned, which is added to x first.")

    codes = _of_weight("unpacked.codes", "int8 [N, K].")
    scale = _of_weight("unpacked.scale", "float32 [N], or [N, G] for G groups.")
    zero_point = _of_weight("unpacked.zero_point", "int32 [N, G], where there are zero points.")

    def repacked(self, packed: Tensor) -> None:
        """Implements `StoredModule.repacked`."""
        memory = self.quantized.memory
        memory.hold(memory.frozen._replace(packed=packed))

    def _place(self) -> Tensor:
        return self.weight

    def settle(self) -> None:
        """Frees the earlier codes that are kept to undo writes to the weight; for a model that was
        merged for good. Copying, saving, loading and moving to another kind of device free them
        too."""
        self.quantized.settle()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and type(value) is nn.Parameter and self._has_codes():
            warnings.warn(
                f"qfx: a float weight was assigned to {self}, which computes in float from now on; "
                "module.weight.data.copy_(values) quantizes values and keeps it int8",
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: Any) -> None:
        """Registers a parameter as any module does. `parallelize_module` uses it to set the part of
        the weight that this rank holds."""
        if name == "weight" and is_distributed(param) and self._has_codes():
            local = param.to_local()
            if not _is_codes(local):
                warnings.warn(
                    f"qfx: {self} computes in float from now on: its {self.in_features} columns "
                    f"are parted at multiples of {local.shape[1]}, within a group or a rotated "
                    "block, whose columns belong together",
                    stacklevel=2,
                )
        super().register_parameter(name, param)

    def _has_codes(self) -> bool:
        return "_parameters" in vars(self) and self.is_quantized

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if not self.is_quantized:
            return super()._apply(fn, recurse)
        weight: Any = self._parameters.pop("weight")
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters = {"weight": weight, **self._parameters}
        self._move(weight, fn(weight.detach()))
        return self

    def _move(self, weight: QuantizedWeight, made: Any) -> None:
        """Puts the result of `.to()` into the same parameter object, if possible."""
        if not _is_codes(made):
            self.weight = nn.Parameter(made, requires_grad=False)
            return
        moved = (made.dtype, made.device) != (weight.dtype, weight.device)
        if moved and not weight.become(made):
            self.weight = _moved(weight, made)


def named_scheme(scheme: Scheme | SiteRecipe | str | None) -> Scheme | SiteRecipe | None:
    """Returns `scheme`, or the scheme of the preset with this name."""
    return Config(scheme=scheme).chosen if isinstance(scheme, str) else scheme


def as_leaf(module: nn.Module, x: Any) -> Any:
    """Returns the node of a symbolic trace that calls the module with the proxy `x`."""
    tracer = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (x,), {})


def _moved(weight: QuantizedWeight, made: Any) -> Any:
    """Returns the parameter for another device; the same one for all modules that share
    `weight`."""
    known = vars(weight).get("_moved")
    if known is None or (known.dtype, known.device) != (made.dtype, made.device):
        known = vars(weight)["_moved"] = as_parameter(made)
    return known


def _is_codes(weight: Tensor) -> bool:
    return type(weight) is QuantizedWeight
