"""StackedWeight: the quantized weights of all experts of one product, in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qfx.nn.experts_like import FloatProduct, why_no_experts_scheme
from qfx.nn.experts_recipe import packing_of
from qfx.nn.frozen import Frozen, float_weight, freeze
from qfx.nn.frozen_state import PARTS, FrozenState, kinds, scheme_tensor, taken_from
from qfx.nn.loading import Checked, Mismatched
from qfx.nn.scheme_tensor import KEY, read, scheme_of
from qfx.nn.serialized_weight import SAVED, code_shapes, saved_scales, stream_of
from qfx.nn.state_checks import Kind, State, check_kind, check_place
from qfx.nn.weight_parts import frozen_of
from qfx.ops.code import code_of
from qfx.ops.experts import stack_packed
from qfx.ops.layout import layout_of
from qfx.ops.storage import Values, values_of
from qfx.values.limits import FLOATS
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.cache import pack


class StackedWeight(Checked):
    """Weights [N, K] of E experts, all quantized by one scheme, and their biases [E, N].

    `packed`: int8 [E, bytes], a packed weight for each expert. `scheme`: with the rotation that
    fits K. `layout` and `code`: arguments of operators.

    The state_dict contains what a `qfx.nn.Linear` saves for a weight: `codes`, `scale` and, if the
    scheme needs it, `zero_point`, each with the experts as first dimension, `scheme` int32 [32],
    and `bias` [E, N] if there is one. Loading checks everything first, and takes the scheme
    together with the codes.
    """

    PARTS: ClassVar[tuple[str, ...]] = PARTS
    UNSAVED: ClassVar[tuple[str, ...]] = ("packed",)  # buffers that are not in its state dict
    packed: Tensor
    bias: nn.Parameter | None

    def __init__(
        self, packed: Tensor, scheme: Scheme, n: int, k: int, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.n, self.k = n, k
        self.register_buffer("packed", packed, persistent=False)
        self.register_parameter("bias", bias)
        self._hold(packed, scheme)

    @classmethod
    def from_float(
        cls, weights: Tensor, how: Scheme | SiteRecipe, bias: nn.Parameter | None = None
    ) -> StackedWeight:
        """Quantizes weights [E, N, K], one expert after the other, and uses the same biases. Raises
        ValueError for a recipe for another shape or weight."""
        if not isinstance(how, SiteRecipe):
            return cls.from_each(weights, tuple(weights.shape), how, bias)
        _, n, k = weights.shape
        packed = pack(weights, (), packing_of(how, weights)).weight
        assert how.scheme is not None
        return cls(packed, how.scheme.at(k), n, k, bias)

    @classmethod
    def from_each(
        cls,
        weights: Iterable[Tensor],
        shape: Sequence[int],
        scheme: Scheme,
        bias: nn.Parameter | None = None,
    ) -> StackedWeight:
        """Quantizes the weights [N, K] of E experts as they come, and uses the same biases.
        `shape`: E, N and K."""
        count, n, k = shape
        packed = stack_packed((freeze(w, scheme)[1].packed for w in weights), count)
        return cls(packed, scheme.at(k), n, k, bias)

    @property
    def experts(self) -> int:
        """E, the number of experts."""
        return self.packed.shape[0]

    def dequantized(self, e: int) -> Tensor:
        """Returns the weight [N, K] of an expert as a new tensor, float32."""
        return float_weight(Frozen(self.packed[e]), self.scheme, self.n, self.k)

    def _hold(self, packed: Tensor, scheme: Scheme) -> None:
        assert scheme.x is not None
        self.packed, self.scheme = packed, scheme
        self.layout = layout_of(scheme.w, scheme.group, self.n)
        self.code = code_of(scheme.x, scheme.rotation)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"experts={self.experts}, {self.k}x{self.n}, bias={bias}, scheme={self.scheme}"

    # --- state dicts and files ---

    @property
    def token(self) -> str:
        """The scheme as a short string."""
        return str(self.scheme)

    def saved(self) -> dict[str, Tensor]:
        """Returns the tensors that are saved for codes, scales and scheme, by name."""
        w, codes = self.scheme.w, torch.empty(0, dtype=torch.int8, device="cpu")
        scales: list[dict[str, Tensor]] = []
        for e, values in enumerate(self._values()):
            one = stream_of(values.codes, w.bits) if w.packed else values.codes
            if e == 0:
                codes = one.new_empty(self.experts, *one.shape)
            codes[e] = one
            scales.append(_scales(values))
        found = {"codes": codes, **self._saved_scales(scales)}
        return {**found, KEY: scheme_tensor(self.scheme, found)}

    def saved_scheme(self) -> Tensor:
        """Returns the tensor that is saved for the scheme. Computes codes only if they are of less
        than 8 bits."""
        packed = self.scheme.w.packed
        found = self._saved_scales([_scales(v) for v in self._values()]) if packed else {}
        return scheme_tensor(self.scheme, found)

    def _values(self) -> Iterator[Values]:
        for packed in self.packed:
            yield values_of(packed, self.scheme.w, self.scheme.group, self.n, self.k)

    def _saved_scales(self, each: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Stacks the scales of the experts. One dtype, and minimums or none, are those of all."""
        found = {name: torch.stack([one[name] for one in each]) for name in each[0]}
        return saved_scales(Values(None, **found)) if self.scheme.w.packed else found

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: t for name, t in self.saved().items()})

    @classmethod
    def taken_from(
        cls, state: State, prefix: str, experts: int, n: int, k: int
    ) -> FrozenState | None:
        """Takes the saved tensors of weights [E, N, K] from a state dict: their names begin with
        `prefix`. Returns them after checking those of each expert; None if there are none. Raises
        the errors of `StoredModule.taken_from`."""
        parts = {name: state[prefix + name] for name in PARTS if prefix + name in state}
        if not parts:
            return None
        for name, t in parts.items():
            many = isinstance(t, Tensor) and t.dim() > 1 and t.shape[0] == experts
            if name != KEY and not (name in SAVED and many):
                raise ValueError(f"{prefix}{name} does not belong to {experts} experts")
        each = (taken_from(_of_expert(parts, prefix, e), prefix, n, k) for e in range(experts))
        schemes = [found.scheme for found in each if found is not None]
        if why := why_no_experts_scheme(schemes[0]):
            raise ValueError(f"{prefix}{KEY}: {why}")
        return FrozenState(schemes[0], {n: t for n, t in parts.items() if n != KEY})

    @classmethod
    def kinds(cls, scheme: Tensor, name: str, experts: int, n: int, k: int) -> dict[str, Kind]:
        """Returns the dtype and shape of each saved tensor except the scheme, by name. `scheme`:
        the saved scheme tensor, called `name` in messages. Raises ValueError for an invalid
        scheme."""
        fields = read(scheme, name, "Linear")
        each = kinds(scheme_of(fields, name), fields, n, k).items()
        return {part: (dtype, (experts, *shape)) for part, (dtype, shape) in each}

    @classmethod
    def shapes(cls, experts: int, n: int, k: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes that the saved codes of weights [E, N, K] may have."""
        return tuple((experts, *shape) for shape in code_shapes(n, k))

    @classmethod
    def from_state(cls, product: FloatProduct, found: FrozenState) -> StackedWeight:
        """Creates the weight that replaces `product`, from tensors that `taken_from` returned for a
        product of this size. The biases of `product` are used, its weights are not read."""
        n, k = product.weights.shape[1:]
        return cls(_packed(found, k), found.scheme, n, k, product.bias)

    def check_state(self, state: State, prefix: str) -> None:
        """Implements `Checked.check_state`."""
        self._checked(state, prefix)

    def _checked(self, state: State, prefix: str) -> FrozenState | None:
        bias = f"{prefix}bias"
        if bias in state and self.bias is not None:
            check_kind(state[bias], bias, FLOATS, (self.experts, self.n))
        return self.taken_from(state, prefix, self.experts, self.n, self.k)

    def _own_keys(self) -> set[str]:
        return {*PARTS}

    def _to_put(self, state: State, prefix: str, assign: bool) -> FrozenState | None:
        found = self._checked(state, prefix)
        for name in SAVED:
            check_place(state.get(prefix + name), prefix + name, self.packed, assign)
        return found

    def _mismatched(self, state: State, prefix: str, found: Any) -> Mismatched:
        return Mismatched([prefix + name for name in ("codes", KEY)] if found is None else [], [])

    def _put(self, found: FrozenState, assign: bool) -> None:
        self._hold(_packed(found, self.k), found.scheme)

    # --- copies ---

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())  # type: ignore[arg-type]
        buffers = {n: t for n, t in state["_buffers"].items() if n != "packed"}
        return {**state, "_buffers": buffers, "saved": self.saved()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        state = dict(state)
        saved = state.pop("saved")
        super().__setstate__(state)
        found = self.taken_from(saved, "", saved["codes"].shape[0], self.n, self.k)
        assert found is not None
        self.register_buffer("packed", None, persistent=False)
        self._put(found, True)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        device = fn(self.packed.new_empty(0)).device
        if device != self.packed.device:
            raise RuntimeError(
                f"experts in int8 are moved from {self.packed.device} to {device}, for which there "
                "is no kernel: leave them float, qfx.Config(skip=['experts']), or move the float "
                "model"
            )
        return super()._apply(fn, recurse)


def _sent(weight: StackedWeight) -> tuple[Any, ...]:
    """Pickles a module for multiprocessing, so that processes share the memory of its tensors."""
    return _received, (nn.Module.__getstate__(weight),)


def _received(state: dict[str, Any]) -> StackedWeight:
    made = StackedWeight.__new__(StackedWeight)
    nn.Module.__setstate__(made, state)
    return made


ForkingPickler.register(StackedWeight, _sent)


def _packed(found: FrozenState, k: int) -> Tensor:
    """Packs the weights of one expert after the other, from checked tensors."""
    tensors, count = found.tensors, len(found.tensors["codes"])
    each = (found._replace(tensors={n: t[e] for n, t in tensors.items()}) for e in range(count))
    return stack_packed((frozen_of(one, k).packed for one in each), count)


def _of_expert(parts: Mapping[str, Any], prefix: str, e: int) -> dict[str, Any]:
    return {prefix + name: t if name == KEY else t[e] for name, t in parts.items()}


def _scales(values: Values) -> dict[str, Tensor]:
    return {n: t for n, t in values._asdict().items() if n != "codes" and t is not None}
