"""BinaryLinear: 1-bit weights and activations, trained with a straight-through gradient.
(H1)-(H6)"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qfx.nn.dtypes import casting_all_but, drawn_linear, output_dtype
from qfx.nn.functional import first_order, scaled_gradient, shifted
from qfx.nn.hook_transfer import sizes
from qfx.nn.qat_state import TrainedState
from qfx.nn.scheme_tensor import written
from qfx.values.scheme import PER_ROW, PER_TENSOR
from qfx.weights.memo import Memo

ops = torch.ops.qfx
torch.fx.wrap("output_dtype")  # needed in every module that calls it
CLIP = 1.0  # weights beyond it get no gradient


def binary_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    axes: tuple[int, ...] = PER_ROW,
    packed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns sign(x) [..., K] @ sign(weight) [N, K].T * x_scale * mean|weight| + bias [N]. (H3)

    The sum of signs is exact. `x_scale`: float32 [1], positive. `axes`: the axes of mean|weight|,
    `PER_ROW` (one scale for each output) or `PER_TENSOR`. `packed`: the result of `binary_packed`
    for this weight, if it is already known. Has first-order gradients (H4)-(H6) for x, weight, bias
    and x_scale.

    Source: Rastegari et al., XNOR-Net, 2016; the masks are from Courbariaux et al., Binarized
    Neural Networks, 2016.
    """
    bits, w_scale = packed or binary_packed(weight, axes)
    return _Binary.apply(x, weight, bias, x_scale, bits, w_scale)  # type: ignore[no-any-return]


def binary_packed(weight: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns (signs, mean|weight|) of a weight [N, K]: the signs with one bit for each element, in
    the layout of the kernels, and the mean over `axes` as float32 [N]."""
    size = weight.detach().float().abs()
    mean = size.mean(1) if axes == PER_ROW else size.mean().expand(weight.shape[0])
    return ops.binary_pack(weight.detach()), mean.contiguous()


class _Binary(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor, bits: Tensor, scale: Tensor
    ) -> Tensor:
        return ops.binary_linear(x, bits, x_scale * scale, bias, "none", output_dtype(x))  # type: ignore

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, x_scale, _, w_scale = inputs
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight, x_scale, w_scale = ctx.saved_tensors
        grad = first_order(grad, "binary_linear", x, weight)
        g_mn = grad.reshape(math.prod(x.shape[:-1]), weight.shape[0])
        x_mk = x.reshape(g_mn.shape[0], x.shape[-1])
        dx_hat = g_mn @ (_sign(weight, torch.float32) * w_scale[:, None]).to(grad.dtype)
        signs = _sign(x_mk, grad.dtype)
        dx = dx_hat * (x_mk.abs() <= x_scale)  # (H4)
        d_scale = (dx_hat * signs).sum(dtype=torch.float32)  # (H5)
        dw = (g_mn.t() @ signs) * x_scale * (weight.abs() <= CLIP)  # (H6)
        db = None if ctx.bias_dtype is None else g_mn.sum(0).to(ctx.bias_dtype)
        dx = dx.reshape(x.shape).to(x.dtype)
        return dx, dw.to(weight.dtype), db, d_scale.reshape(x_scale.shape), None, None


def _sign(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns +1 or -1 for each element, as in the forward pass: both zeros give +1. Equation
    (H1)."""
    return 2 * (v >= 0).to(dtype) - 1


class BinaryLinear(TrainedState):
    """y = sign(x + shift) [..., K] @ sign(weight) [N, K].T * scales + bias. (H3)

    y has the dtype of x, or that of autocast if it is on, like the output of nn.Linear. Parameters:
    `weight` and `bias` in float; `x_log_scale` [1], the logarithm of the scale of activations;
    `shift` [K], if requested. The scale of weights is mean|weight| over `axes`: `PER_ROW`, one for
    each output, or `PER_TENSOR`; other axes raise ValueError. Until `observe` is called,
    `x_log_scale` and therefore the output is NaN.

        linear = qfx.nn.BinaryLinear(64, 32)
        linear.observe(x)  # x [..., 64]

    In eval mode the weight is packed once, one bit for each element, and again when it changes; a
    compiled graph packs it at each call. Casting the module leaves `x_log_scale` in float32. The
    state_dict also contains a tensor `scheme`. Loading a state_dict that was saved with other
    `axes` raises an error.
    """

    kind = "BinaryLinear"
    steps = ("x_log_scale",)
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        axes: tuple[int, ...] = PER_ROW,
        shift: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._take(drawn_linear(in_features, out_features, bias, device, dtype), axes, shift)

    @classmethod
    def from_float(
        cls, linear: nn.Linear, axes: tuple[int, ...] = PER_ROW, shift: bool = False
    ) -> BinaryLinear:
        """Returns a BinaryLinear that uses the same parameters as `linear`."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(linear, axes, shift)
        module.train(linear.training)
        return module

    def _take(self, linear: nn.Linear, axes: tuple[int, ...], shift: bool) -> None:
        if axes not in (PER_ROW, PER_TENSOR):
            raise ValueError(
                f"BinaryLinear: axes={axes} is neither (1,) per row nor (0, 1) per tensor"
            )
        self.in_features, self.out_features = sizes(linear, "BinaryLinear")
        self.axes, self.weight = axes, linear.weight
        self.register_parameter("bias", linear.bias)
        device = linear.weight.device
        unknown = torch.full((1,), torch.nan, dtype=torch.float32, device=device)
        self.x_log_scale = nn.Parameter(unknown)
        zeros = torch.zeros(self.in_features, dtype=torch.float32, device=device)
        self.shift = nn.Parameter(zeros) if shift else None
        self._memo = Memo()

    def trained_under(self) -> Tensor:
        """Returns the scheme as the int32 tensor that the state dict contains under `scheme`."""
        return written(self.kind, {"w.bits": 1, "w.axes": self.axes})

    @property
    def learns_activations(self) -> bool:
        """Always True: the scale of activations is a parameter, which `observe` fits to data."""
        return True

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Fits the scale of activations to x [..., K]. The scale becomes mean|x + shift|, which has
        the least square error."""
        size = shifted(x, self.shift).float().abs().mean()
        self.x_log_scale.copy_(size.clamp_min(2.0**-126).log().reshape(1))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(casting_all_but((self.x_log_scale,), fn), recurse)

    def forward(self, input: Tensor) -> Tensor:  # the name of the argument of nn.Linear
        """Maps x [..., K] to [..., N]."""
        x_scale = scaled_gradient(self.x_log_scale.float().exp(), self.in_features, 2)
        packed = None
        if not self.training:
            packed = self._memo.get((self.weight,), lambda: binary_packed(self.weight, self.axes))
        return binary_linear(
            shifted(input, self.shift), self.weight, self.bias, x_scale, self.axes, packed
        )

    def extra_repr(self) -> str:
        shift = ", shift=True" if self.shift is not None else ""
        per = "row" if self.axes == PER_ROW else "tensor"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, weight scale per {per}{shift}"
        )
