"""Linear: int8 weights instead of float ones, for a model that is saved, loaded and served."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn

from qfx.host.tensors import has_values
from qfx.nn.carry import sizes
from qfx.nn.dtypes import casting_all_but, drawn_linear
from qfx.nn.frozen import Frozen, float_weight, freeze, linear, prepared
from qfx.nn.frozen_state import PARTS, FrozenState, kinds, scheme_tensor, taken_from
from qfx.nn.loading import Kind, State, Stored, placed, sent
from qfx.nn.saved_values import SAVED, code_shapes, loaded_values, saved_scales, saved_values
from qfx.nn.scheme_tensor import KEY, read, scheme_of
from qfx.nn.trained_biases import watch
from qfx.nn.written import Earlier, Weight, check_written, written
from qfx.ops.lowbit_packing import has_minimums
from qfx.ops.storage import Values, packed_values, values_of
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe

_OPTIONAL = ("factor", "x_scale", "x_zero_point", "shift")


class Linear(Stored, nn.Linear):
    """y = x [..., K] @ w^ [N, K].T + bias; w^ are int8 codes and does not train.

    It is an nn.Linear to whoever asks, so that adapters find it, but has no parameter `weight`.

    y has the type of x, or that of autocast where it is on, as from nn.Linear. The state_dict holds
    `codes` int8 [N, K], `scale` float32 [N] (or [N, G] for G groups), `bias`, what the scheme needs
    of `zero_point` int32 [N, G], `factor` float32 [K], `x_scale` float32 [1], `x_zero_point` int32
    [1], a learned `shift` float32 [K] that is added to x first, and `scheme` int32 [32]
    (`qfx/nn/scheme_tensor.py`). Of a packed weight codes are uint8, a stream of bits for each row,
    scales bfloat16 or float16, zero points int8 or a `minimum` (`qfx/nn/saved_values.py`).
    Loading takes the scheme with the codes, whichever the module had, after all of it was checked;
    what does not fit together is an error that leaves the module as it was. In memory codes and
    scales are there once, as the kernels read them (`packed`), which loading, copying and
    unpickling derive from the codes; `codes`, `scale` and `zero_point` are made of it at each
    access. x and the bias get gradients (T1). Casting the module casts the bias alone.
    """

    PARTS = PARTS
    READ_ONLY = ("packed", *_OPTIONAL)
    _earlier: tuple[Earlier, ...] = ()  # what it held before what was written to its weight
    packed: Tensor
    factor: Tensor | None
    x_scale: Tensor | None
    x_zero_point: Tensor | None
    shift: Tensor | None

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
        self._take(drawn_linear(in_features, out_features, bias), scheme)

    @classmethod
    def from_float(cls, linear: nn.Linear, scheme: Scheme | SiteRecipe | None = None) -> Linear:
        """Quantizes the weight of `linear` and takes over its bias, the very parameter.

        `scheme`: `qfx.Scheme()` by default; a `SiteRecipe` brings static scales and a factor with
        it, and codes. Raises ValueError for a scheme that needs a recipe, and for a recipe of
        another shape or weight.
        """
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(linear, scheme)
        module.train(linear.training)
        return module

    def _take(self, linear: nn.Linear, scheme: Scheme | SiteRecipe | None) -> None:
        self.in_features, self.out_features = sizes(linear, "Linear")
        self.bias = linear.bias
        scheme, frozen = freeze(linear.weight, scheme or Scheme())
        self._how = prepared(scheme, self.out_features)
        self.register_buffer("packed", frozen.packed, persistent=False)
        for name in _OPTIONAL:
            self.register_buffer(name, getattr(frozen, name))
        watch(self)

    @property
    def scheme(self) -> Scheme:
        """How its operands are quantized, with the rotation in use."""
        return self._how.scheme

    @property
    def token(self) -> str:
        """Its scheme's."""
        return str(self.scheme)

    @property
    def _values(self) -> Values:
        return self._values_in(self.packed)

    def _values_in(self, packed: Tensor) -> Values:
        w, group = self.scheme.w, self.scheme.group
        return values_of(packed, w, group, self.out_features, self.in_features)

    @property
    def codes(self) -> Tensor:
        """int8 [N, K]."""
        return self._values.codes  # type: ignore[no-any-return]

    @property
    def scale(self) -> Tensor:
        """float32 [N], or [N, G] for G groups."""
        return self._values.scale  # type: ignore[no-any-return]

    @property
    def zero_point(self) -> Tensor | None:
        """int32 [N, G], where the weight has zero points."""
        return self._values.zero_point  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """float32 [N, K], made at each access: what multiplies x. (Q5) (R1)

        Assigning to `weight.data`, or writing in place to it or to `weight`, quantizes the values
        again and says in the log how much of the change that loses. The codes of before are kept, a
        byte an element, and are restored when the change is taken back (Q13): see `settle`.
        `weight = v` keeps none. A write to a view of it (`weight[0].mul_(2)`) changes nothing.
        """
        values = float_weight(self._frozen(), self.scheme, self.out_features, self.in_features)
        return values if torch.compiler.is_compiling() else Weight.of(values, self._write)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        if not getattr(value, "_heard", False):  # `weight += d` writes in place, and assigns
            self._write(value)
        self.settle()

    def settle(self) -> None:
        """Forgets the codes that writes to the weight have kept, as of a model that was merged for
        good. Copying, saving, loading and moving to another kind of device forget them too."""
        self._earlier = ()

    def _write(self, value: Tensor) -> None:
        check_written(value, self.out_features, self.in_features, self.packed)
        frozen, self._earlier = written(value, self._frozen(), self._earlier, self.scheme)
        for name, tensor in frozen._asdict().items():
            self._buffers[name] = tensor

    def reset_parameters(self) -> None:
        """As nn.Linear's: draws a weight, and a bias if it has one."""
        shape, device = (self.in_features, self.out_features), self.packed.device
        drawn = nn.Linear(*shape, dtype=torch.float32, device=device)
        self.weight = drawn.weight.detach()
        if self.bias is not None:
            self.bias.data.copy_(drawn.bias.detach())

    def forward(self, input: Tensor) -> Tensor:  # called as nn.Linear's may be
        """x [..., K] -> [..., N]."""
        return linear(input, self.bias, self._frozen(), self._how)

    def _frozen(self) -> Frozen:
        held = self._buffers  # without nn.Module's __getattr__, which takes as long as the sums
        return Frozen(held["packed"], *[held.get(name) for name in _OPTIONAL])  # type: ignore

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme}"
        )

    # --- the packed form stays with this build; what leaves the process is codes ---

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        saved = saved_values(self._values, self.scheme)
        state = {prefix + name: tensor for name, tensor in saved.items()}
        if not self.scheme.w.packed:  # as files have them: the scales before the other numbers
            own = self._parameters.items()
            destination.update({prefix + name: t for name, t in own if t is not None})
            destination.update({n: t for n, t in state.items() if n != f"{prefix}codes"})
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(state)
        destination[prefix + KEY] = scheme_tensor(self.scheme, {**self._buffers, **saved})

    def saved_scheme(self) -> Tensor:
        """See `Stored`."""
        scales = saved_scales(self._values) if self.scheme.w.packed else {}
        return scheme_tensor(self.scheme, {**self._buffers, **scales})

    def saved_parts(self) -> list[str]:
        """See `Stored`."""
        fields: dict[str, Any] = {n: getattr(self, n) is not None for n in _OPTIONAL}
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

    def _put(self, found: FrozenState, assign: bool) -> None:
        self.settle()
        device = found.tensors["codes"].device if assign else self.packed.device
        given = {name: placed(t, device, assign) for name, t in found.tensors.items()}
        tensors = {name: t for name, t in given.items() if t is not None}
        for name in _OPTIONAL:
            self._buffers[name] = tensors.get(name)
        self._how = prepared(found.scheme, self.out_features)
        self._hold(loaded_values(tensors, found.scheme, self.in_features))
        watch(self)

    def _hold(self, values: Values) -> None:
        self._buffers["packed"] = packed_values(values, self.scheme.w, self.scheme.group)

    def __getstate__(self) -> dict[str, Any]:
        state = self._sent()
        kept = {name: t for name, t in self._buffers.items() if name != "packed"}
        state["_buffers"] = {**kept, **saved_values(self._values, self.scheme)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._receive(state)
        held = self._buffers
        if "codes" not in held:  # an earlier qfx pickled them by another name
            held["codes"] = held.pop("packed")
        saved = {name: t for name in SAVED if (t := held.pop(name, None)) is not None}
        self._buffers = {"packed": None, **held}
        self._hold(loaded_values(saved, self.scheme, self.in_features))

    def _sent(self) -> dict[str, Any]:
        state = super()._sent()
        state.pop("_earlier", None)
        state["scheme"] = state.pop("_how").scheme  # what follows from it stays with this build
        return state

    def _receive(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self._how = prepared(state.pop("scheme"), state["out_features"])
        super()._receive(state)
        watch(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self._frozen()
        super()._apply(casting_all_but(before, fn), recurse)
        if before.packed.device.type != self.packed.device.type:
            self.settle()
            self._pack_anew(before.packed)
        return self

    def _pack_anew(self, before: Tensor) -> None:
        """Each kind of device has its layout; from and to meta there are no codes to move."""
        device = self.packed.device
        moved = [
            None if t is None else t.to(device) if has_values(t) else _zeros(t, device)
            for t in self._values_in(before)
        ]
        self._hold(Values(*moved))


def _zeros(like: Tensor, device: torch.device) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=device)


ForkingPickler.register(Linear, sent)
