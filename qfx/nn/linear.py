"""Linear: an nn.Linear whose weight is int8, for a model that is saved, loaded and served."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qfx.host.autograd import transforming
from qfx.host.subclasses import as_parameter
from qfx.nn.carry import sizes
from qfx.nn.dtypes import drawn_linear
from qfx.nn.earlier_pickles import from_earlier
from qfx.nn.frozen import linear
from qfx.nn.frozen_state import PARTS, FrozenState, kinds, taken_from
from qfx.nn.loading import Kind, State, Stored, check_finite, check_kind, placed
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.nn.saved_values import SAVED, code_shapes
from qfx.nn.scheme_tensor import KEY, read, scheme_of
from qfx.nn.state_part import StatePart
from qfx.nn.trained_biases import watch
from qfx.nn.weight_parts import OPTIONAL, frozen_of, parts_of, scheme_part, weight_of
from qfx.ops.lowbit_packing import has_minimums
from qfx.values.floats import FLOATS
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe


def _of_weight(name: str, doc: str) -> Any:
    return property(lambda self: getattr(self.quantized, name), doc=doc)


class Linear(Stored, nn.Linear):
    """y = x [..., K] @ w^ [N, K].T + bias; w^ are int8 codes and does not train.

    An nn.Linear whose parameter `weight` is a `QuantizedWeight`: to all that reads or writes it a
    tensor of floats, in memory a packed weight. Under another weight (a float Parameter that is
    assigned, one that a parametrization computes) it is the nn.Linear of that weight.

    y has the type of x, or that of autocast where it is on, as from nn.Linear. The state_dict holds
    `codes` int8 [N, K], `scale` float32 [N] (or [N, G] for G groups), `bias`, what the scheme needs
    of `zero_point` int32 [N, G], `factor` float32 [K], `x_scale` float32 [1], `x_zero_point` int32
    [1], a learned `shift` float32 [K] that is added to x first, and `scheme` int32 [32]
    (`qfx/nn/scheme_tensor.py`). Of a packed weight codes are uint8, a stream of bits for each row,
    scales bfloat16 or float16, zero points int8 or a `minimum` (`qfx/nn/saved_values.py`). What is
    written to them in place reaches the weight. Loading takes the scheme with the codes, whichever
    the module had, or a float `weight`, which is quantized under its scheme; all of it is checked
    first, and what does not fit together is an error that leaves the module as it was. x and the
    bias get gradients (T1). Casting the module casts the bias and the type that `weight` says.
    """

    PARTS = PARTS
    floats_are_transposed = False  # whether a float state dict has its weight as [K, N]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: Scheme | SiteRecipe | None = None,
    ) -> None:
        """Initialised as nn.Linear is; mostly to be loaded into."""
        nn.Module.__init__(self)
        if isinstance(scheme, SiteRecipe):
            scheme = replace(scheme, rounding=None)  # its codes are those of another weight
        drawn = drawn_linear(in_features, out_features, bias)
        self._take(drawn, QuantizedWeight.of(drawn.weight, scheme))

    @classmethod
    def from_float(cls, linear: nn.Linear, scheme: Scheme | SiteRecipe | None = None) -> Linear:
        """Quantizes the weight of `linear` and takes over its bias, the very parameter.

        `scheme`: `qfx.Scheme()` by default; a `SiteRecipe` brings static scales and a factor with
        it, and codes. Raises ValueError for a scheme that needs a recipe, and for a recipe of
        another shape or weight.
        """
        sizes(linear, "Linear")
        return cls._of(linear, QuantizedWeight.of(linear.weight, scheme))

    @classmethod
    def from_state(cls, linear: nn.Module, found: FrozenState) -> Linear:
        """See `Stored`."""
        k, n = sizes(linear, "Linear")
        tensors = {name: tensor.detach() for name, tensor in found.tensors.items()}
        dtype = linear.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return cls._of(linear, weight_of(found._replace(tensors=tensors), n, k, dtype))

    @classmethod
    def _of(cls, linear: nn.Module, weight: QuantizedWeight) -> Linear:
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(linear, weight)
        module.train(linear.training)
        return module

    def _take(self, linear: Any, weight: QuantizedWeight) -> None:
        self.in_features, self.out_features = sizes(linear, "Linear")
        self.weight = as_parameter(weight)
        self.register_parameter("bias", linear.bias)
        if getattr(linear, "floats_are_transposed", False):
            self.floats_are_transposed = True
        watch(self)

    @property
    def quantized(self) -> QuantizedWeight:
        """Its weight. Raises AttributeError where that is not quantized (any more)."""
        weight: Any = self._parameters.get("weight")
        if type(weight) is not QuantizedWeight:
            raise AttributeError(f"the weight of {self} is {type(weight).__name__}, not quantized")
        return weight

    @property
    def is_quantized(self) -> bool:
        """Whether its weight is int8, as it is unless another one was assigned."""
        weight = self._parameters.get("weight")
        return weight is not None and _is_codes(weight)

    @property
    def scheme(self) -> Scheme:
        """How its operands are quantized, with the rotation in use."""
        return self.quantized.scheme

    @property
    def token(self) -> str:
        """Its scheme's."""
        return str(self.scheme)

    packed = _of_weight("packed", "The packed weight: bytes as the kernels read them.")
    factor = _of_weight("factor", "float32 [K], which multiplies x, where the scheme has one.")
    x_scale = _of_weight("x_scale", "float32 [1], of activations with a static scale.")
    x_zero_point = _of_weight("x_zero_point", "int32 [1], of activations with a static scale.")
    shift = _of_weight("shift", "float32 [K], learned, which is added to x first.")

    @property
    def codes(self) -> Tensor:
        """int8 [N, K]."""
        return self.quantized.unpacked.codes  # type: ignore[no-any-return]

    @property
    def scale(self) -> Tensor:
        """float32 [N], or [N, G] for G groups."""
        return self.quantized.unpacked.scale  # type: ignore[no-any-return]

    @property
    def zero_point(self) -> Tensor | None:
        """int32 [N, G], where the weight has zero points."""
        return self.quantized.unpacked.zero_point  # type: ignore[no-any-return]

    def repacked(self, packed: Tensor) -> None:
        """See `Stored`."""
        memory = self.quantized.memory
        memory.hold(memory.frozen._replace(packed=packed))

    def _place(self) -> Tensor:
        return self.weight

    def settle(self) -> None:
        """Forgets the codes that writes to the weight have kept, as of a model that was merged for
        good. Copying, saving, loading and moving to another kind of device forget them too."""
        self.quantized.settle()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self._replaces(value):
            warnings.warn(
                f"qfx: a float weight was assigned to {self}, which computes in float from now on; "
                "module.weight.data.copy_(values) quantizes values and keeps it int8",
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def _replaces(self, value: Any) -> bool:
        floating = isinstance(value, nn.Parameter) and type(value) is nn.Parameter
        return floating and "_parameters" in vars(self) and self.is_quantized

    def reset_parameters(self) -> None:
        """As nn.Linear's: draws a weight, and a bias if it has one."""
        shape, device = (self.in_features, self.out_features), self.weight.device
        drawn = nn.Linear(*shape, dtype=torch.float32, device=device)
        self.weight.data.copy_(drawn.weight.detach())
        if self.is_quantized:
            self.settle()
        if self.bias is not None:
            self.bias.data.copy_(drawn.bias.detach())

    def forward(self, input: Tensor) -> Tensor:  # called as nn.Linear's may be
        """x [..., K] -> [..., N]."""
        weight: Any = self._parameters.get("weight")
        if type(weight) is not QuantizedWeight or transforming():
            return F.linear(input, self.weight, self.bias)
        if isinstance(input, fx.Proxy):
            return _as_leaf(self, input)
        return linear(input, self.bias, weight.frozen, weight.how)

    def extra_repr(self) -> str:
        scheme = f", scheme={self.scheme}" if self.is_quantized else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{scheme}"
        )

    # --- what leaves the process is codes, and no layout of this build ---

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.is_quantized:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        own: dict[str, Tensor] = {}  # the bias, and what users gave the module
        super()._save_to_state_dict(own, "", keep_vars)
        del own["weight"]
        state = {**dict(self._state_parts()), **own}
        saved = [name for name in SAVED if name in state]
        packed = self.scheme.w.packed  # the order that files have
        first, last = (OPTIONAL, saved) if packed else ((*saved[1:], *OPTIONAL), saved[:1])
        for name in dict.fromkeys(("bias", *first, *own, *last, KEY)):
            if name in state:
                destination[prefix + name] = state[name]

    def _state_parts(self) -> Iterator[tuple[str, Tensor]]:
        weight = self.quantized
        parts = parts_of(weight)
        said = parts[KEY].clone()

        def stored() -> None:
            """What was written to one part may fit only what will be written to the others."""
            weight.settle()
            if not torch.equal(parts[KEY], said):
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
        """See `Stored`."""
        return scheme_part(self.quantized)

    def saved_parts(self) -> list[str]:
        """See `Stored`."""
        weight = self.quantized
        fields: dict[str, Any] = {name: getattr(weight, name) is not None for name in OPTIONAL}
        minimum = self.scheme.w.packed and has_minimums(self.packed)
        fields |= {"minimum": minimum, "half": torch.bfloat16}
        held = kinds(self.scheme, fields, self.out_features, self.in_features)
        return [name for name in PARTS if name == KEY or name in held]

    @classmethod
    def taken_from(cls, state: State, prefix: str, n: int, k: int) -> FrozenState | None:
        """See `Stored`."""
        return taken_from(state, prefix, n, k)

    @classmethod
    def shapes(cls, n: int, k: int) -> tuple[tuple[int, int], ...]:
        """See `Stored`."""
        return code_shapes(n, k)

    @classmethod
    def kinds(cls, scheme: Tensor, name: str, n: int, k: int) -> dict[str, Kind]:
        """See `Stored`."""
        fields = read(scheme, name, "Linear")
        return kinds(scheme_of(fields, name), fields, n, k)

    def _checked(self, state: State, prefix: str) -> FrozenState | Tensor | None:
        """Parts, or a weight of its own kind or of floats."""
        found = super()._checked(state, prefix)
        weight = state.get(prefix + "weight")
        if found is not None or weight is None:
            return found  # type: ignore[no-any-return]
        if isinstance(weight, QuantizedWeight):
            return weight
        shape = self.out_features, self.in_features
        turned = self.floats_are_transposed
        check_kind(weight, f"{prefix}weight", FLOATS, shape[::-1] if turned else shape)
        check_finite(weight, f"{prefix}weight")
        return weight.t() if turned else weight  # type: ignore[no-any-return]

    def _put(self, found: FrozenState | Tensor, assign: bool) -> None:
        here = self._parameters["weight"]
        assert here is not None
        if isinstance(found, FrozenState):
            device = found.tensors["codes"].device if assign else here.device
            given = {name: placed(t, device, assign) for name, t in found.tensors.items()}
            tensors = {name: t for name, t in given.items() if t is not None}
            shape = self.out_features, self.in_features
            found = weight_of(FrozenState(found.scheme, tensors), *shape, here.dtype)
        if not isinstance(here, QuantizedWeight):
            self.weight = nn.Parameter(found.detach(), requires_grad=not _is_codes(found))
        elif isinstance(found, QuantizedWeight):
            if not here.load(found, assign):
                self.weight = as_parameter(found)
        else:
            here.detach().write(found.to(here.device))
            here.settle()
        watch(self)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(from_earlier(state) if "scheme" in state else dict(state))
        watch(self)

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
        """What `.to()` made of the weight is put into the very parameter where that can be."""
        if not _is_codes(made):
            self.weight = nn.Parameter(made, requires_grad=False)
            return
        moved = (made.dtype, made.device) != (weight.dtype, weight.device)
        if moved and not weight.become(made):
            self.weight = _moved(weight, made)


def _moved(weight: QuantizedWeight, made: Any) -> Any:
    """The parameter for another device; the same one for all modules that share `weight`."""
    known = vars(weight).get("_moved")
    if known is None or (known.dtype, known.device) != (made.dtype, made.device):
        known = vars(weight)["_moved"] = as_parameter(made)
    return known


def _is_codes(weight: Tensor) -> bool:
    return type(weight) is QuantizedWeight


def _as_leaf(module: Linear, x: Any) -> Any:
    """Symbolic tracing of a model calls the modules of torch.nn, and this one too."""
    tracer = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (x,), {})
