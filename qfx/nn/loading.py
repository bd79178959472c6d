"""Loads state dicts into modules that save a scheme together with their tensors.

A module checks its whole part of the state dict before it takes any of it. If `check_first` is
registered, the parts of all modules of a model are checked first.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from qfx.host.modules import register_once
from qfx.nn.hook_transfer import sizes
from qfx.nn.scheme_tensor import KEY
from qfx.nn.state_checks import Kind, State, check_bias, check_place

if TYPE_CHECKING:
    from typing_extensions import Self


class Mismatched(NamedTuple):
    """Names of a state dict that a module misses, and those that it has no use for."""

    missing: list[str]
    unexpected: list[str]


class Checked(nn.Module):
    """A module that can check its part of a state dict."""

    def check_state(self, state: State, prefix: str) -> None:
        """Raises ValueError if the part of the state dict below `prefix` cannot be loaded into this
        module."""
        raise NotImplementedError

    def _own_keys(self) -> set[str]:
        """Returns the names, without prefix, that this class loads instead of nn.Module."""
        raise NotImplementedError

    def _to_put(self, state: State, prefix: str, assign: bool) -> Any:
        """Returns what `_put` stores, None for nothing. Raises ValueError as `check_state` does."""
        self.check_state(state, prefix)

    def _mismatched(self, state: State, prefix: str, found: Any) -> Mismatched:
        """Returns the mismatches among `_own_keys`. `found`: the result of `_to_put`."""
        raise NotImplementedError

    def _put(self, found: Any, assign: bool) -> None:
        """Stores the parts that `_to_put` returned: these tensors themselves if `assign`, or copies
        on the device of the module."""
        raise NotImplementedError

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        assign = metadata.get("assign_to_params_buffers", False)
        try:
            found = self._to_put(state_dict, prefix, assign)
        except ValueError as why:
            errors.append(str(why))
            return
        mismatched = self._mismatched(state_dict, prefix, found)
        missing += mismatched.missing
        unexpected += mismatched.unexpected
        ours = {prefix + name for name in self._own_keys()}
        others = {key: value for key, value in state_dict.items() if key not in ours}
        absent: list[str] = []
        super()._load_from_state_dict(others, prefix, metadata, strict, absent, unexpected, errors)
        missing += [key for key in absent if key not in ours]
        if found is not None:
            self._put(found, assign)


class StoredModule(Checked):
    """A linear or embedding that stores a quantized weight and no float weight.

    Its state dict contains its scheme, its codes and further tensors: `PARTS`, in this order. In
    memory `packed` holds the codes and the scales that the kernels read with them; the other
    tensors are buffers.
    """

    PARTS: ClassVar[tuple[str, ...]]
    READ_ONLY: ClassVar[tuple[str, ...]]  # its buffers, which forward never writes
    UNSAVED: ClassVar[tuple[str, ...]] = ("packed",)  # buffers that are not in its state dict
    LOADS_FLOATS: ClassVar[bool] = False  # whether it loads a state dict with floats, not codes
    in_features: int
    out_features: int
    bias: Any
    packed: Tensor
    is_quantized = True

    @property
    def float_numel(self) -> int:
        """The number of elements of the weight in float."""
        return self.in_features * self.out_features

    @property
    def token(self) -> str:
        """The scheme as a short string."""
        raise NotImplementedError

    def saved_scheme(self) -> Tensor:
        """Returns the tensor that the state dict contains for the scheme, without computing the
        codes."""
        raise NotImplementedError

    @classmethod
    def taken_from(cls, state: State, prefix: str, n: int, k: int) -> Any:
        """Returns the checked parts of a weight [N, K] and its `token`; None if the state has none
        of them.

        Raises ValueError if the parts do not fit each other or the weight, or have values that
        quantization cannot produce.
        """
        raise NotImplementedError

    @classmethod
    def kinds(cls, scheme: Tensor, name: str, n: int, k: int) -> dict[str, Kind]:
        """Returns the dtype and shape of each saved tensor except the scheme, by name. `scheme`:
        the saved scheme tensor, called `name` in messages. Raises ValueError for an invalid
        scheme."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, n: int, k: int) -> tuple[tuple[int, int], ...]:
        """Returns the shapes that the saved codes of a weight [N, K] may have."""
        raise NotImplementedError

    @classmethod
    def from_float(cls, linear: nn.Linear) -> Self:
        """Quantizes the weight of `linear` and uses the same bias parameter."""
        raise NotImplementedError

    @classmethod
    def from_state(cls, linear: nn.Module, found: Any) -> Self:
        """Creates the module that replaces `linear`, from tensors that `taken_from` returned for a
        weight of the same size.

        The bias of `linear` is used. Its float weight is not read and may have no values. The codes
        are packed on their device.
        """
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = sizes(linear, cls.__name__)
        module.bias = linear.bias
        for name in cls.READ_ONLY:
            module.register_buffer(name, None, persistent=name not in cls.UNSAVED)
        module._put(found, assign=True)
        module.train(linear.training)
        return module

    def repacked(self, packed: Tensor) -> None:
        """Uses `packed` as the memory of the packed weight from now on."""
        self.packed = packed

    def _place(self) -> Tensor:
        """Returns a tensor on the device of the module's tensors."""
        return self.packed

    def saved_parts(self) -> Sequence[str]:
        """Returns the names in PARTS that the state dict would contain, without unpacking
        anything."""
        return [name for name in self.PARTS if self._buffers.get(name, 0) is not None]

    def _sent(self) -> dict[str, Any]:
        """Returns the attributes for another process of this machine, with the packed weight as it
        is in memory."""
        return super().__getstate__()  # does not include the result of `.compile()`

    def _receive(self, state: dict[str, Any]) -> None:
        super().__setstate__(dict(state))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets requires_grad as any module does, and warns that the weight does not train."""
        if requires_grad:
            warnings.warn(
                f"qfx: requires_grad_() on {self}: its weight is codes and does not train"
                + (", its bias does" if self.bias is not None else "")
                + ". What is to be trained is left float: qfx.Config(skip=[...])",
                stacklevel=2,
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "qfx: requires_grad of a quantized weight")
            return super().requires_grad_(requires_grad)

    def check_state(self, state: State, prefix: str) -> None:
        """Raises ValueError if the part of the state dict below `prefix` cannot be loaded into this
        module."""
        self._checked(state, prefix)

    def _checked(self, state: State, prefix: str) -> Any:
        check_bias(state, prefix, self.bias)
        return self.taken_from(state, prefix, self.out_features, self.in_features)

    def _own_keys(self) -> set[str]:
        return {"weight", *self.PARTS}  # a weight that was not checked is never loaded

    def _to_put(self, state: State, prefix: str, assign: bool) -> Any:
        found = self._checked(state, prefix)
        for name in ("bias", "weight", *self.PARTS[1:]):
            check_place(state.get(prefix + name), prefix + name, self._place(), assign)
        return found

    def _mismatched(self, state: State, prefix: str, found: Any) -> Mismatched:
        missing = [prefix + name for name in self.saved_parts()] if found is None else []
        weight, floats = f"{prefix}weight", self.LOADS_FLOATS and f"{prefix}{KEY}" not in state
        return Mismatched(missing, [weight] if weight in state and not floats else [])


def sent(module: StoredModule) -> tuple[Any, ...]:
    """Pickles a module for multiprocessing, so that processes share the memory of its tensors. A
    usual pickle would contain codes that are computed on request, in memory of their own."""
    return _received, (type(module), module._sent())


def _received(kind: type[StoredModule], state: dict[str, Any]) -> StoredModule:
    module = kind.__new__(kind)
    module._receive(state)
    return module


def placed(tensor: Tensor | None, device: torch.device, assign: bool) -> Tensor | None:
    """Returns a tensor of a state dict as a module stores it: itself, or a copy on the module's
    device."""
    if tensor is None or assign:
        return None if tensor is None else tensor.detach()
    return tensor.detach().to(device, copy=True)


def fault_of(module: Checked, state: State, prefix: str) -> str | None:
    try:
        module.check_state(state, prefix)
    except ValueError as why:
        return str(why)
    return None


def check_first(model: nn.Module) -> None:
    """Makes `model.load_state_dict` check a whole state dict before it loads anything.

    Without this, each module checks its own part, after the modules before it are loaded. Errors
    that torch finds itself (missing and unexpected keys, sizes of other modules) are still raised
    after loading.
    """
    register_once(model, _check)


def _check(model: nn.Module, state: State, prefix: str, *_: Any) -> None:
    each = model.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False)
    checked = [(f"{name}." if name else "", m) for name, m in each if isinstance(m, Checked)]
    faults = [fault for at, m in checked if (fault := fault_of(m, state, at))]
    if faults:
        what = f"Error(s) in loading state_dict for {type(model).__name__}"
        raise RuntimeError("\n\t".join([f"{what}, nothing was loaded:", *faults]))
