"""SignLinear: a linear with one bit for each weight, for serving a 1-bit model. (H3)"""

from __future__ import annotations

import math
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qfx.nn.binary import binary_packed
from qfx.nn.dtypes import casting_all_but, drawn_linear, output_dtype
from qfx.nn.functional import first_order, shifted
from qfx.nn.hook_transfer import sizes
from qfx.nn.loading import StoredModule, placed, sent
from qfx.nn.scheme_tensor import KEY, read, written
from qfx.nn.state_checks import Kind, State, check_finite, check_parts, check_positive, check_range
from qfx.ops.binary import octets_of, packed_octets, signs_of
from qfx.values.scheme import PER_ROW

ops = torch.ops.qfx
torch.fx.wrap("output_dtype")  # needed in every module that calls it
_TENSORS = ("scale", "x_scale", "shift")
ONE_BIT = "1 bit"


class SignState(NamedTuple):
    """The checked tensors of a SignLinear, without the scheme."""

    tensors: Mapping[str, Tensor]
    token: str = ONE_BIT


class SignLinear(StoredModule):
    """y = sign(x + shift) [..., K] @ sign(w) [N, K].T * scale + bias; the signs do not train. (H3)

    `qfx.convert` makes it from a `BinaryLinear`; outputs are equal bit for bit. y has the dtype of
    x, or that of autocast if it is on, like the output of nn.Linear.

        linear = qfx.nn.SignLinear.from_float(torch.nn.Linear(64, 32))

    The state_dict contains `signs` uint8 [N, K / 8], rounded up, where bit k % 8 of byte k // 8 is
    set if w_nk >= 0; `scale` float32 [N], the product of the scales of activations and weights;
    `x_scale` float32 [1], the scale of activations, beyond which x gets no gradient; `bias`;
    `shift` float32 [K], if there is one; and `scheme` int32 [32]. Loading checks everything first,
    raises an error if it does not fit, and adds or removes the shift.

    In memory there is one copy of the signs, as the kernels read them (`packed`). x and the bias
    get gradients (H4). Casting the module casts only the bias.
    """

    PARTS = (KEY, "signs", *_TENSORS)
    token = ONE_BIT
    READ_ONLY = ("packed", *_TENSORS)
    packed: Tensor
    scale: Tensor
    x_scale: Tensor
    shift: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialises the weight like nn.Linear, for activations of scale 1; mostly used before a
        state_dict is loaded."""
        super().__init__()
        self._take(drawn_linear(in_features, out_features, bias, device, dtype))

    @classmethod
    def from_float(cls, linear: nn.Linear) -> SignLinear:
        """Takes the signs of the weight of `linear`, for activations of scale 1, and uses the same
        bias."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(linear)
        module.train(linear.training)
        return module

    @classmethod
    def from_packed(
        cls, linear: nn.Module, packed: Tensor, tensors: Mapping[str, Tensor]
    ) -> SignLinear:
        """Creates a replacement of `linear` with the same bias. `packed`: the result of
        `binary_pack` for its weight. `tensors`: `scale` [N], `x_scale` [1] and optionally `shift`
        [K]."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._hold(linear, packed, tensors)
        module.train(linear.training)
        return module

    def _take(self, linear: nn.Linear) -> None:
        sizes(linear, "SignLinear")
        packed, scale = binary_packed(linear.weight, PER_ROW)
        one = torch.ones(1, dtype=torch.float32, device=scale.device)
        self._hold(linear, packed, {"scale": scale, "x_scale": one})

    def _hold(self, linear: Any, packed: Tensor, tensors: Mapping[str, Tensor]) -> None:
        self.in_features, self.out_features = sizes(linear, "SignLinear")
        self.bias = linear.bias
        self.register_buffer("packed", packed, persistent=False)
        for name in _TENSORS:
            self.register_buffer(name, tensors.get(name))

    @property
    def signs(self) -> Tensor:
        """The signs, uint8 [N, K / 8], rounded up."""
        return octets_of(self.packed, self.out_features, self.in_features)

    @property
    def weight(self) -> Tensor:
        """The weight float32 [N, K], created at each access: +1 or -1, times the scale of its
        output."""
        signs = signs_of(self.signs, self.in_features).float()
        return signs * (self.scale / self.x_scale)[:, None]

    def forward(self, input: Tensor) -> Tensor:  # the name of the argument of nn.Linear
        """Maps x [..., K] to [..., N]."""
        x = shifted(input, self.shift)
        if torch.is_grad_enabled() and (x.requires_grad or _trains(self.bias)):
            own = (self.packed, self.scale, self.x_scale)
            return _SignLinearFunction.apply(x, self.bias, *own)  # type: ignore[no-any-return]
        return _run(x, self.bias, self.packed, self.scale)

    def extra_repr(self) -> str:
        shift = ", shift=True" if self.shift is not None else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{shift}"
        )

    # --- the packed form is for this build only; signs are saved ---

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "signs"] = self.signs
        destination[prefix + KEY] = self.saved_scheme()

    def saved_scheme(self) -> Tensor:
        """Implements `StoredModule.saved_scheme`."""
        return _scheme_tensor(self.shift is not None)

    @classmethod
    def taken_from(cls, state: State, prefix: str, n: int, k: int) -> SignState | None:
        """Implements `StoredModule.taken_from`."""
        parts = {name: state[prefix + name] for name in cls.PARTS if prefix + name in state}
        if not parts:
            return None
        if KEY not in parts:
            raise ValueError(f"{prefix}{KEY} is missing, which says what the signs mean")
        wanted = cls.kinds(parts.pop(KEY), prefix + KEY, n, k)
        check_parts(parts, prefix, cls.PARTS[1:], wanted, f"{prefix}{KEY} says so")
        if rest := k % 8:
            check_range(parts["signs"][:, -1], f"{prefix}signs", 0, 2**rest - 1)
        for name in wanted.keys() & {*_TENSORS}:
            check = check_finite if name == "shift" else check_positive
            check(parts[name], prefix + name)
        return SignState(parts)

    @classmethod
    def shapes(cls, n: int, k: int) -> tuple[tuple[int, int], ...]:
        """Returns the shape of the saved signs: eight in a byte."""
        return ((n, -(-k // 8)),)

    @classmethod
    def kinds(cls, scheme: Tensor, name: str, n: int, k: int) -> dict[str, Kind]:
        """Implements `StoredModule.kinds`."""
        fields = read(scheme, name, "SignLinear")
        if fields != read(_scheme_tensor(fields["shift"]), name, "SignLinear"):
            raise ValueError(f"{name} does not say what linears of one bit say")
        found: dict[str, Kind] = {"signs": (torch.uint8, cls.shapes(n, k)[0])}
        found |= {"scale": (torch.float32, (n,)), "x_scale": (torch.float32, (1,))}
        return found | ({"shift": (torch.float32, (k,))} if fields["shift"] else {})

    def _put(self, found: SignState, assign: bool) -> None:
        signs = found.tensors["signs"].detach()
        device = signs.device if assign else self.packed.device
        for name in _TENSORS:
            self._buffers[name] = placed(found.tensors.get(name), device, assign)
        self.packed = packed_octets(signs.to(device), self.in_features)

    def __getstate__(self) -> dict[str, Any]:
        state = self._sent()
        state["_buffers"] = {**self._buffers, "packed": self.signs}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._receive(state)
        self.packed = packed_octets(self.packed, self.in_features)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.packed
        super()._apply(casting_all_but(self._buffers.values(), fn), recurse)
        if before.device.type != self.packed.device.type:
            n, k = self.out_features, self.in_features
            signs = torch.zeros((n, -(-k // 8)), dtype=torch.uint8, device=self.packed.device)
            if not (before.is_meta or signs.is_meta):  # else there are no signs to move
                signs = octets_of(before, n, k).to(signs.device)
            self.packed = packed_octets(signs, k)
        return self


def _scheme_tensor(shift: bool) -> Tensor:
    return written("SignLinear", {"w.bits": 1, "shift": shift})


def _trains(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


def _run(x: Tensor, bias: Tensor | None, packed: Tensor, scale: Tensor) -> Tensor:
    return ops.binary_linear(x, packed, scale, bias, "none", output_dtype(x))  # type: ignore


class _SignLinearFunction(torch.autograd.Function):
    """The autograd function of SignLinear: the same output bit for bit, with gradients for x and
    the bias. Equation (H4)."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, packed: Tensor, scale: Tensor, x_scale: Tensor
    ) -> Tensor:
        return _run(x, bias, packed, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, bias, packed, scale, x_scale = inputs
        ctx.save_for_backward(x if x.requires_grad else None, packed, scale, x_scale)
        ctx.shape, ctx.bias_dtype = x.shape, None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, packed, scale, x_scale = ctx.saved_tensors
        grad = first_order(grad, "SignLinear", scale)
        n, k = scale.shape[0], ctx.shape[-1]
        g_mn, dx = grad.reshape(math.prod(ctx.shape[:-1]), n), None
        if x is not None:
            signs = signs_of(octets_of(packed, n, k), k).to(grad.dtype)
            through = (g_mn * (scale / x_scale)).to(grad.dtype) @ signs
            dx = through.reshape(ctx.shape).to(x.dtype) * (x.abs() <= x_scale)
        db = None if ctx.bias_dtype is None else g_mn.sum(0).to(ctx.bias_dtype)
        return dx, db, None, None, None


ForkingPickler.register(SignLinear, sent)
