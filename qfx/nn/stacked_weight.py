"""StackedWeight: the quantized weights of all experts of one product, in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn

from qfx.nn.experts_like import why_no_experts_scheme
from qfx.nn.frozen import Frozen, float_weight, freeze
from qfx.nn.frozen_state import PARTS, FrozenState, scheme_tensor, taken_from
from qfx.nn.loading import Checked, Mismatched
from qfx.nn.scheme_tensor import KEY
from qfx.nn.serialized_weight import SAVED, saved_values
from qfx.nn.state_checks import State, check_kind, check_place
from qfx.nn.weight_parts import frozen_of
from qfx.ops.code import code_of
from qfx.ops.experts import stack_packed
from qfx.ops.layout import layout_of
from qfx.ops.storage import values_of
from qfx.values.limits import FLOATS
from qfx.values.scheme import Scheme


class StackedWeight(Checked):
    """Weights [N, K] of E experts, all quantized by one scheme, and their biases [E, N].

    `packed`: int8 [E, bytes], a packed weight for each expert. `scheme`: with the rotation that
    fits K. `layout` and `code`: arguments of operators.

    The state_dict contains what a `qfx.nn.Linear` saves for a weight: `codes`, `scale` and, if the
    scheme needs it, `zero_point`, each with the experts as first dimension, `scheme` int32 [32],
    and `bias` [E, N] if there is one. Loading checks everything first, and takes the scheme
    together with the codes.
    """

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
        cls, weights: Tensor, scheme: Scheme, bias: nn.Parameter | None = None
    ) -> StackedWeight:
        """Quantizes weights [E, N, K], one expert after the other, and uses the same biases."""
        count, n, k = weights.shape
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

    # --- state dicts ---

    def saved(self) -> dict[str, Tensor]:
        """Returns the tensors that are saved for codes, scales and scheme, by name."""
        found: dict[str, Tensor] = {}
        for e, packed in enumerate(self.packed):
            values = values_of(packed, self.scheme.w, self.scheme.group, self.n, self.k)
            parts = saved_values(values, self.scheme)
            if not found:
                found = {n: t.new_empty(self.experts, *t.shape) for n, t in parts.items()}
            for name, t in parts.items():
                found[name][e] = t
        return {**found, KEY: scheme_tensor(self.scheme, found)}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: t for name, t in self.saved().items()})

    def check_state(self, state: State, prefix: str) -> None:
        """Implements `Checked.check_state`."""
        self._checked(state, prefix)

    def _checked(self, state: State, prefix: str) -> list[FrozenState] | None:
        """Returns the checked parts of each expert; None if the state has none."""
        bias = f"{prefix}bias"
        if bias in state and self.bias is not None:
            check_kind(state[bias], bias, FLOATS, (self.experts, self.n))
        parts = {name: state[prefix + name] for name in PARTS if prefix + name in state}
        if not parts:
            return None
        for name, t in parts.items():
            many = isinstance(t, Tensor) and t.dim() > 1 and t.shape[0] == self.experts
            if name != KEY and not (name in SAVED and many):
                raise ValueError(f"{prefix}{name} does not belong to {self.experts} experts")
        found = [
            taken_from(self._of_expert(parts, prefix, e), prefix, self.n, self.k)
            for e in range(self.experts)
        ]
        if why := why_no_experts_scheme(found[0].scheme):  # type: ignore[union-attr]
            raise ValueError(f"{prefix}{KEY}: {why}")
        return [each for each in found if each is not None]

    def _of_expert(self, parts: Mapping[str, Any], prefix: str, e: int) -> dict[str, Any]:
        return {prefix + name: t if name == KEY else t[e] for name, t in parts.items()}

    def _own_keys(self) -> set[str]:
        return {*PARTS}

    def _to_put(self, state: State, prefix: str, assign: bool) -> list[FrozenState] | None:
        found = self._checked(state, prefix)
        for name in SAVED:
            check_place(state.get(prefix + name), prefix + name, self.packed, assign)
        return found

    def _mismatched(self, state: State, prefix: str, found: Any) -> Mismatched:
        return Mismatched([prefix + name for name in ("codes", KEY)] if found is None else [], [])

    def _put(self, found: list[FrozenState], assign: bool) -> None:
        self._hold(_packed(found, self.k), found[0].scheme)

    # --- copies ---

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())  # type: ignore[arg-type]
        buffers = {n: t for n, t in state["_buffers"].items() if n != "packed"}
        return {**state, "_buffers": buffers, "saved": self.saved()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        state = dict(state)
        saved = state.pop("saved")
        super().__setstate__(state)
        count = saved["codes"].shape[0]
        empty = torch.empty(count, 0, dtype=torch.int8, device="cpu")
        self.register_buffer("packed", empty, persistent=False)
        found = self._checked(saved, "")
        assert found is not None
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


def _packed(found: Iterable[FrozenState], k: int) -> Tensor:
    each = [*found]
    return stack_packed((frozen_of(one, k).packed for one in each), len(each))
