"""LinearState: saving and loading a `qfx.nn.Linear`, from codes or from floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qfx.host.subclasses import as_parameter
from qfx.host.tensors import is_distributed
from qfx.nn.bias_warning import watch
from qfx.nn.frozen_state import PARTS, TENSORS, FrozenState, kinds, taken_from
from qfx.nn.loading import Checked, StoredModule, placed
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.nn.scheme_tensor import KEY, read, scheme_of
from qfx.nn.serialized_weight import SAVED, code_shapes
from qfx.nn.state_checks import Kind, State, check_finite, check_kind
from qfx.nn.state_part import StatePart
from qfx.nn.weight_parts import OPTIONAL, frozen_of, parts_of, scheme_part, weight_of
from qfx.ops.lowbit_packing import has_minimums
from qfx.values.limits import FLOATS


class LinearState(StoredModule):
    """The part of `qfx.nn.Linear` that saves and loads it.

    Saved codes are in a layout that does not depend on this build or processor. Codes of any scheme
    can be loaded; floats are quantized with the scheme that the weight has.
    """

    PARTS = PARTS
    LOADS_FLOATS = True
    weight: Any
    floats_are_transposed = False  # whether a float state dict has its weight as [K, N]

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight, or the part of the weight that this rank holds. Raises AttributeError if the
        weight is not quantized."""
        weight = self._codes_here()
        if weight is None:
            kind = type(self._parameters.get("weight")).__name__
            raise AttributeError(f"the weight of {self} is {kind}, not quantized")
        return weight

    def _codes_here(self) -> QuantizedWeight | None:
        weight: Any = self._parameters.get("weight")
        if is_distributed(weight):
            weight = weight.to_local()
        return weight if type(weight) is QuantizedWeight else None

    @property
    def is_quantized(self) -> bool:  # type: ignore[override]
        """Whether the weight is int8, which it is unless another one was assigned."""
        return type(self._parameters.get("weight")) is QuantizedWeight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.is_quantized:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        own: dict[str, Tensor] = {}  # the bias, and tensors that users added to the module
        super()._save_to_state_dict(own, "", keep_vars)
        del own["weight"]
        state = {**dict(self._state_parts()), **own}
        saved = [name for name in SAVED if name in state]
        packed = self.quantized.scheme.w.packed  # the order that files have
        first, last = (OPTIONAL, saved) if packed else ((*saved[1:], *OPTIONAL), saved[:1])
        for name in dict.fromkeys(("bias", *first, *own, *last, KEY)):
            if name in state:
                destination[prefix + name] = state[name]

    def _state_parts(self) -> Iterator[tuple[str, Tensor]]:
        weight = self.quantized
        parts = parts_of(weight)
        scheme = parts[KEY].clone()

        def stored() -> None:
            """Stores all parts, because a value written to one may only fit values that are written
            next."""
            weight.settle()
            if not torch.equal(parts[KEY], scheme):
                raise ValueError(
                    f"the scheme of a state dict was overwritten, and the module has {weight}: "
                    "model.load_state_dict takes weights of another scheme"
                )
            made = frozen_of(FrozenState(weight.scheme, parts), weight.shape[1])
            if not weight.store(made):
                weight.memory.hold(made)

        for name, tensor in parts.items():
            yield name, StatePart.of(tensor, stored)

    def saved_scheme(self) -> Tensor:
        """Implements `StoredModule.saved_scheme`."""
        return scheme_part(self.quantized)

    def saved_parts(self) -> list[str]:
        """Implements `StoredModule.saved_parts`."""
        weight = self.quantized
        fields: dict[str, Any] = {name: getattr(weight, name) is not None for name in OPTIONAL}
        minimum = self.quantized.scheme.w.packed and has_minimums(weight.packed)
        fields |= {"minimum": minimum, "half": torch.bfloat16}
        expected = kinds(self.quantized.scheme, fields, self.out_features, self.in_features)
        return [name for name in PARTS if name == KEY or name in expected]

    @classmethod
    def taken_from(cls, state: State, prefix: str, n: int, k: int) -> FrozenState | None:
        """Takes the saved tensors of a weight [N, K] from a state dict: their names begin with
        `prefix`. Returns them after checking them; None if there are none. Raises the errors of
        `StoredModule.taken_from`."""
        return taken_from(state, prefix, n, k)

    @classmethod
    def shapes(cls, n: int, k: int) -> tuple[tuple[int, int], ...]:
        """Implements `StoredModule.shapes`."""
        return code_shapes(n, k)

    @classmethod
    def kinds(cls, scheme: Tensor, name: str, n: int, k: int) -> dict[str, Kind]:
        """Implements `StoredModule.kinds`."""
        fields = read(scheme, name, "Linear")
        return kinds(scheme_of(fields, name), fields, n, k)

    def check_state(self, state: State, prefix: str) -> None:
        """Implements `StoredModule.check_state`. A weight that is not quantized is loaded as by
        nn.Linear. Such a module accepts codes only if its weight is a plain parameter."""
        if self._loads_codes(state, prefix):
            super().check_state(state, prefix)
        elif prefix + KEY in state:
            weight = self._parameters.get("weight")
            what = "computed before each call" if weight is None else f"a {type(weight).__name__}"
            raise ValueError(
                f"{prefix}{KEY}: codes are loaded into int8 weights, and {prefix}weight is {what}: "
                "load before the model is sharded, pruned or parametrized"
            )

    def _loads_codes(self, state: State, prefix: str) -> bool:
        own = type(self._parameters.get("weight")) is nn.Parameter
        return self.is_quantized or (own and prefix + KEY in state)

    def _load_from_state_dict(self, state: Any, prefix: str, *how: Any) -> None:
        if self._loads_codes(state, prefix):
            super()._load_from_state_dict(state, prefix, *how)
        else:  # as any module
            super(Checked, self)._load_from_state_dict(state, prefix, *how)

    def _checked(self, state: State, prefix: str) -> FrozenState | Tensor | None:
        """Returns what the state dict contains for the weight, after checks: the tensors of a
        quantized weight, a `QuantizedWeight`, or floats [N, K]; None if there is nothing."""
        found = super()._checked(state, prefix)
        weight = state.get(prefix + "weight")
        if found is not None or weight is None:
            return found  # type: ignore[no-any-return]
        if isinstance(weight, QuantizedWeight):
            return weight
        check_kind(weight, f"{prefix}weight", FLOATS, self._float_shape())
        check_finite(weight, f"{prefix}weight")
        return self._matrix_of(weight)

    def _float_shape(self) -> tuple[int, ...]:
        """Returns the shape of the weight of the float module."""
        shape = self.out_features, self.in_features
        return shape[::-1] if self.floats_are_transposed else shape

    def _matrix_of(self, weight: Tensor) -> Tensor:
        """Returns the weight of the float module as a matrix [N, K]."""
        return weight.t() if self.floats_are_transposed else weight

    def _put(self, found: FrozenState | Tensor, assign: bool) -> None:
        here = self._parameters["weight"]
        assert here is not None
        if isinstance(found, FrozenState):
            device = found.tensors["codes"].device if assign else here.device
            parts = {name: placed(t, device, assign) for name, t in found.tensors.items()}
            tensors = {name: t for name, t in parts.items() if t is not None}
            shape = self.out_features, self.in_features
            found = weight_of(FrozenState(found.scheme, tensors), *shape, here.dtype)
        if not isinstance(here, QuantizedWeight):
            codes = isinstance(found, QuantizedWeight)
            own: Any = nn.Parameter(found.detach(), requires_grad=not codes)
            self.weight = own
        elif isinstance(found, QuantizedWeight):
            if not here.load(found, assign):
                self.weight = as_parameter(found)
        else:
            here.requantize(found.to(here.device))
        watch(self)  # type: ignore[arg-type]

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(_from_legacy_state(state) if "scheme" in state else dict(state))
        watch(self)  # type: ignore[arg-type]


def _from_legacy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a module, from the state that an earlier version of qfx pickled.

    That state has an attribute `scheme` and the tensors as buffers. In the oldest pickles the
    buffer with the codes is called `packed`.
    """
    made, buffers = dict(state), dict(state["_buffers"])
    if "codes" not in buffers:
        buffers["codes"] = buffers.pop("packed")
    found = {name: buffers.pop(name, None) for name in TENSORS}
    buffers.pop("packed", None)
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    n, k = made["out_features"], made["in_features"]
    weight = weight_of(FrozenState(made.pop("scheme"), tensors), n, k, torch.float32)
    own = {"weight": as_parameter(weight), **made["_parameters"]}
    return made | {"_parameters": own, "_buffers": buffers}
