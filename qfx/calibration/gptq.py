"""GPTQ: rounds a weight column by column so that it loses little on given inputs, equations (Q8) to
(Q10).

Source: Frantar et al., GPTQ, 2023. The error of a column is compensated by the columns that are not
rounded yet. This implementation uses the equivalent form of Babai's nearest plane: one Cholesky
factor of H and no inverse.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qfx.host.autograd import without_autocast
from qfx.ops.quantize import code_range
from qfx.ops.single_tensors import Quantized, dequantize, quantize
from qfx.values.scheme import QSpec

LEAST_DAMPING = 0.01
LARGEST_ROW = 2.0**96  # bound on |x|^2: as many rows as fit into memory do not overflow
CORRECTION = 0.25  # a part: the full correction would follow the noise of a small sample
_BLOCK = 128  # columns between two matmuls


class Hessian:
    """The sum H = sum_m x_m x_m^T over the rows x_m of all inputs [*, K] of a matmul, float32 [K,
    K], and the number of rows, equation (Q8). Rows with a NaN or an infinity, or too large for sums
    of squares, are left out."""

    def __init__(self, k: int) -> None:
        self.h_kk = torch.zeros(k, k, dtype=torch.float32, device="cpu")
        self.rows = 0

    def update(self, x: Tensor) -> None:
        rows = x.reshape(x.shape[:-1].numel(), self.h_kk.shape[0]).float()
        usable = rows.square().sum(1) < LARGEST_ROW
        rows = rows if usable.all() else rows[usable]
        self.h_kk.addmm_(rows.t(), rows)
        self.rows += rows.shape[0]

    @property
    def damping(self) -> float:
        """The number added to the diagonal, relative to the diagonal's mean: K / M, because a
        sample of M rows determines H only that well; at least 0.01 and at most 1."""
        return min(max(self.h_kk.shape[0] / max(self.rows, 1), LEAST_DAMPING), 1.0)


class ComparedMoments(Hessian):
    """H over the rows x_m that a matmul gets from the model rounded so far, and also C = sum_m (f_m
    - x_m) x_m^T, where f_m are the same rows in the float model, equation (Q11)."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.c_kk = torch.zeros(k, k, dtype=torch.float32, device="cpu")

    def compare(self, in_float: Tensor, x: Tensor) -> None:
        both = [t.reshape(t.shape[:-1].numel(), self.h_kk.shape[0]).float() for t in (in_float, x)]
        usable = torch.stack([t.square().sum(1) < LARGEST_ROW for t in both]).all(0)
        exact, rows = (t[usable] for t in both)
        self.update(rows)
        self.c_kk.addmm_((exact - rows).t(), rows)


class Order(NamedTuple):
    """The order in which columns are rounded, and how the error of each is distributed to later
    ones."""

    h_kk: Tensor  # in the original order of the columns
    columns: Tensor  # int64 [K]: the column of the weight at each place
    share_kk: Tensor  # [i, j]: the fraction of the error of i that goes to j > i, in this order
    ways_kk: Tensor | None = None  # the codes are to represent w + w ways (Q11)


@without_autocast
def ordered(moments: Hessian) -> Order:
    """Returns the order in which the columns of a weight are rounded, those with the largest inputs
    first, and how their errors are distributed, equation (Q9)."""
    h_kk = moments.h_kk
    columns = h_kk.diagonal().argsort(descending=True, stable=True)
    mean = h_kk.diagonal()[columns].double().mean().item() if h_kk.numel() else 0.0
    damping = moments.damping * mean
    share = _share(h_kk, columns, damping or 1.0)
    while share is None:  # float32 sums stay positive definite except in rare cases
        damping *= 10
        share = _share(h_kk, columns, damping)
    return Order(h_kk, columns, share, _ways(moments, damping or 1.0))


def _ways(moments: Hessian, damping: float) -> Tensor | None:
    """Returns a fraction of C (h + damping)^-1, which corrects the weight for the error of
    preceding matmuls, equation (Q11). Returns None if these have no error."""
    if not isinstance(moments, ComparedMoments) or not moments.c_kk.any():
        return None
    h = moments.h_kk.double()
    h.diagonal().add_(damping)
    lower = torch.linalg.cholesky(h)
    return torch.cholesky_solve(moments.c_kk.t().double(), lower).t().float() * CORRECTION


def _share(h_kk: Tensor, columns: Tensor, damping: float) -> Tensor | None:
    """Returns U_ij / U_jj, the fraction of the error of column i that goes to column j, where U is
    upper triangular and U U^T = h + damping, with h in the order of `columns`. Returns None if
    there is no such U.

    U is a Cholesky factor of the reversed matrix. At most two float64 matrices exist at once,
    because they dominate the memory for a large K.
    """
    back = columns.flip(0)
    h = h_kk[back][:, back].double()
    h.diagonal().add_(damping)
    lower, info = torch.linalg.cholesky_ex(h)
    del h
    return None if info else lower.div_(lower.diagonal().clone()).float().flip(0, 1)


@without_autocast
def rounded_codes(w_nk: Tensor, spec: QSpec, order: Order) -> Tensor:
    """Returns `w_nk`, float32 [N, K], rounded to int8 [N, K] with the scales given by `spec`,
    equations (Q9) to (Q11).

    A row is rounded to nearest if its error d, measured as sum_kl d_k H_kl d_l, would be larger
    otherwise, or if it contains a NaN or an infinity.
    """
    nearest = quantize(w_nk, spec)
    if not w_nk.numel():
        return nearest.codes
    aim_nk = w_nk if order.ways_kk is None else w_nk + w_nk @ order.ways_kk
    spread = nearest._replace(codes=_spread(aim_nk, nearest, order))
    a, b = aim_nk - dequantize(nearest), aim_nk - dequantize(spread)
    gains = ((a - b) @ order.h_kk).mul_(a.add_(b)).sum(1, keepdim=True)  # a H a^T - b H b^T
    return torch.where(gains > 0, spread.codes, nearest.codes)  # NaN compares false


def _spread(w_nk: Tensor, nearest: Quantized, order: Order) -> Tensor:
    """Computes equation (Q9); returns int8 [N, K]. Works on the transpose, with the columns in
    order as rows, so that values needed together are contiguous."""
    _, scale, zero, spec = nearest
    qmin, qmax = code_range(spec.bits, spec.symmetric)
    group = order.columns // spec.group if spec.group else torch.zeros_like(order.columns)
    w_kn, scale_gn, zero_gn = w_nk.t()[order.columns], scale.t(), zero.t().float()
    inverse_gn = 1 / scale_gn
    codes_kn = torch.empty(w_kn.shape, dtype=torch.int8, device=w_kn.device)
    error_kn = torch.empty_like(w_kn)
    groups, share = group.tolist(), order.share_kk
    for start in range(0, w_kn.shape[0], _BLOCK):
        block = slice(start, min(start + _BLOCK, w_kn.shape[0]))
        aim = torch.addmm(w_kn[block], share[:start, block].t(), error_kn[:start])
        for j in range(block.start, block.stop):
            g, before = groups[j], slice(start, j)
            wanted = torch.addmv(aim[j - start], error_kn[before].t(), share[before, j])
            codes = (wanted * inverse_gn[g]).round_().add_(zero_gn[g]).clamp_(qmin, qmax)
            codes_kn[j] = codes
            error_kn[j] = w_kn[j] - codes.sub_(zero_gn[g]).mul_(scale_gn[g])
    codes_nk = torch.empty(w_nk.shape, dtype=torch.int8, device=w_nk.device)
    codes_nk[:, order.columns] = codes_kn.t()
    return codes_nk
