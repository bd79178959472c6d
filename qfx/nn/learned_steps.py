"""LearnedSteps: what a linear and a convolution have in common whose quantization steps are
parameters, for quantization-aware training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qfx.nn.dtypes import casting_all_but
from qfx.nn.functional import best_step, lsq_linear, lsq_packed, scaled_gradient, shifted, specs
from qfx.nn.qat_state import TrainedState
from qfx.nn.scheme_tensor import fields_of, written
from qfx.values.scheme import PER_TENSOR, Scheme
from qfx.weights.memo import Memo


class LearnedSteps(TrainedState):
    """A module that multiplies rows of activations [M, K] and a weight, as a matrix [N, K], in
    int8, with learned steps. (Q6) (T2)

    Parameters: `weight` and `bias` in float; `w_log_step`, the logarithm of the weight's step, [N,
    1] or [1, 1] depending on `scheme.w`; `x_log_step` [1], if `scheme.x` is per tensor; `shift`
    [K], if requested. In eval mode the weight is packed once, and again when it or its step
    changes.
    """

    steps = ("w_log_step", "x_log_step")
    in_features: int
    out_features: int
    scheme: Scheme
    weight: nn.Parameter
    bias: Tensor | None

    def _take(self, module: nn.Module, scheme: Scheme, shift: bool) -> None:
        """Uses the parameters of `module`, with a step that is fitted to its weight."""
        spec, w_spec = specs(scheme, self.kind)
        self.scheme = scheme
        self.weight = module.weight  # type: ignore[assignment]
        self.register_parameter("bias", module.bias)  # type: ignore[arg-type]
        matrix = self._matrix()
        self.out_features, self.in_features = matrix.shape
        step = best_step(matrix, w_spec.bits, True, w_spec.axes)
        self.w_log_step = nn.Parameter(step.log())
        learned = spec.axes == PER_TENSOR
        unknown = torch.full((1,), torch.nan, dtype=torch.float32, device=matrix.device)
        self.x_log_step = nn.Parameter(unknown) if learned else None
        zeros = torch.zeros(self.in_features, dtype=torch.float32, device=matrix.device)
        self.shift = nn.Parameter(zeros) if shift else None
        self._memo = Memo()

    def _matrix(self) -> Tensor:
        """Returns the weight as a matrix [N, K]."""
        return self.weight

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
    def _fit(self, x: Tensor) -> None:
        """Fits the step of activations to x [..., K] by the least mean square error."""
        if self.x_log_step is not None:
            spec, _ = specs(self.scheme, self.kind)
            step = best_step(shifted(x, self.shift), spec.bits, spec.symmetric, PER_TENSOR)
            self.x_log_step.copy_(step.log().reshape(1))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(casting_all_but((self.w_log_step, self.x_log_step), fn), recurse)

    def _product(self, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """Maps x [..., K] to [..., N]. `parts`: x, or that of each group of the outputs. `bias`:
        [N]."""
        n, k, count = self.out_features, self.in_features, len(parts)
        shared = n * k if self.scheme.w.axes == PER_TENSOR else k
        w_step = scaled_gradient(self.w_log_step.float().exp(), shared, self.scheme.w.bits)
        x_step = None
        if self.x_log_step is not None:
            bits = specs(self.scheme, self.kind)[0].bits
            x_step = scaled_gradient(self.x_log_step.float().exp(), k, bits)
        weights = _chunks(self._matrix(), count)
        steps = [w_step] * count if w_step.shape[0] == 1 else _chunks(w_step, count)
        packed: Sequence[Tensor | None] = [None] * count
        if not self.training:
            pairs = zip(weights, steps, strict=True)
            packed = self._memo.get(
                (self.weight, self.w_log_step),
                lambda: [lsq_packed(weight, step, self.scheme) for weight, step in pairs],
            )
        biases = [None] * count if bias is None else _chunks(bias, count)
        each = zip(parts, weights, biases, steps, packed, strict=True)
        products = [
            lsq_linear(
                shifted(x, self.shift), w, b, x_step, step, self.scheme, self._seed(x), ready
            )
            for x, w, b, step, ready in each
        ]
        return products[0] if count == 1 else torch.cat(products, -1)

    def _seed(self, x: Tensor) -> Tensor | None:
        """Returns a seed for the stochastic rounding of int8 gradients."""
        if self.scheme.backward != "int8":
            return None
        return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=x.device)


def _chunks(tensor: Tensor, count: int) -> Sequence[Tensor]:
    return [tensor] if count == 1 else tensor.chunk(count)
