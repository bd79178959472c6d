"""LSQLinear: a linear whose quantization steps are parameters, for quantization-aware training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qfx.nn.dtypes import casting_all_but, drawn_linear
from qfx.nn.functional import best_step, lsq_linear, lsq_packed, scaled_gradient, shifted, specs
from qfx.nn.hook_transfer import sizes
from qfx.nn.qat_state import TrainedState
from qfx.nn.scheme_tensor import fields_of, written
from qfx.values.scheme import PER_TENSOR, Scheme
from qfx.weights.memo import Memo


class LSQLinear(TrainedState):
    """y = x^ [..., K] @ w^ [N, K].T + bias in int8, with learned steps. (Q6) (T2)

    y has the dtype of x, or that of autocast if it is on, like the output of nn.Linear. Parameters:
    `weight` and `bias` in float; `w_log_step`, the logarithm of the weight's step, [N, 1] or [1, 1]
    depending on `scheme.w`; `x_log_step` [1], if `scheme.x` is per tensor (for per row, the scales
    of activations are dynamic); `shift` [K], which is added to x before quantization, if requested.
    The logarithm keeps a step positive and makes the learning rate a relative change. Until
    `observe` is called, `x_log_step` and therefore the output is NaN.

        linear = qfx.nn.LSQLinear.from_float(torch.nn.Linear(64, 32))

    Casting the module leaves the steps in float32. In eval mode the weight is packed once, and
    again when it or its step changes; a compiled graph packs it at each call. The state_dict also
    contains a tensor `scheme`. Loading steps of another scheme raises an error. Raises ValueError
    for a scheme with rotation, groups, per-column or static scales, or float activations.
    """

    kind = "LSQLinear"
    steps = ("w_log_step", "x_log_step")
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: Scheme | None = None,
        shift: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = drawn_linear(in_features, out_features, bias, device, dtype)
        self._take(made, scheme or Scheme(), shift)

    @classmethod
    def from_float(
        cls, linear: nn.Linear, scheme: Scheme | None = None, shift: bool = False
    ) -> LSQLinear:
        """Returns an LSQLinear that uses the same parameters as `linear`, with a step that is
        fitted to the weight."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(linear, scheme or Scheme(), shift)
        module.train(linear.training)
        return module

    def _take(self, linear: nn.Linear, scheme: Scheme, shift: bool) -> None:
        self.in_features, self.out_features = sizes(linear, "LSQLinear")
        self.scheme, self.weight = scheme, linear.weight
        self.register_parameter("bias", linear.bias)
        spec, w_spec = specs(scheme, "LSQLinear")
        step = best_step(linear.weight, w_spec.bits, True, w_spec.axes)
        self.w_log_step = nn.Parameter(step.log())
        device = linear.weight.device
        learned = spec.axes == PER_TENSOR
        unknown = torch.full((1,), torch.nan, dtype=torch.float32, device=device)
        self.x_log_step = nn.Parameter(unknown) if learned else None
        zeros = torch.zeros(self.in_features, dtype=torch.float32, device=device)
        self.shift = nn.Parameter(zeros) if shift else None
        self._memo = Memo()

    def trained_under(self) -> Tensor:
        """Returns the scheme as the int32 tensor that the state dict contains under `scheme`. It
        does not say whether the matmuls of gradients are int8."""
        return written(self.kind, fields_of(replace(self.scheme, backward="float")))

    @property
    def learns_activations(self) -> bool:
        """Whether the step of activations is a parameter, which `observe` fits to data. Otherwise
        the scales of activations are dynamic."""
        return self.x_log_step is not None

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Fits the step of activations to x [..., K] by the least mean square error."""
        if self.x_log_step is not None:
            spec, _ = specs(self.scheme, "LSQLinear")
            step = best_step(shifted(x, self.shift), spec.bits, spec.symmetric, PER_TENSOR)
            self.x_log_step.copy_(step.log().reshape(1))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(casting_all_but((self.w_log_step, self.x_log_step), fn), recurse)

    def forward(self, input: Tensor) -> Tensor:  # the name of the argument of nn.Linear
        """Maps x [..., K] to [..., N]."""
        k, n = self.in_features, self.out_features
        x = shifted(input, self.shift)
        shared = n * k if self.scheme.w.axes == PER_TENSOR else k
        w_step = scaled_gradient(self.w_log_step.float().exp(), shared, self.scheme.w.bits)
        x_step = None
        if self.x_log_step is not None:
            bits = specs(self.scheme, "LSQLinear")[0].bits
            x_step = scaled_gradient(self.x_log_step.float().exp(), k, bits)
        seed = None
        if self.scheme.backward == "int8":
            seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=x.device)
        packed = None
        if not self.training:
            packed = self._memo.get(
                (self.weight, self.w_log_step),
                lambda: lsq_packed(self.weight, w_step, self.scheme),
            )
        return lsq_linear(x, self.weight, self.bias, x_step, w_step, self.scheme, seed, packed)

    def extra_repr(self) -> str:
        shift = ", shift=True" if self.shift is not None else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme}{shift}"
        )
