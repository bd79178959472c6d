"""Codes that a recipe gives a weight, and the check that they are this weight's."""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.host.tensors import has_values
from qfx.io.errors import UserError
from qfx.ops.packing import Packing
from qfx.values.rounding import Rounding, weight_digest


def digest_for(w_nk: Tensor, packing: Packing) -> str:
    """What codes of this weight under this packing are known by: its values, how it is transformed
    and what its scales follow from."""
    how = (str(packing.spec), packing.factor, packing.rotation, packing.outliers)
    return weight_digest(w_nk, repr(how))


def codes_of(w_nk: Tensor, packing: Packing, rounding: Rounding) -> Tensor:
    """The codes, int8 [N, K] where the weight is; without values where it has none.

    Raises ValueError for another weight than the one that they were found for.
    """
    if not has_values(w_nk):
        return torch.empty(w_nk.shape, dtype=torch.int8, device=w_nk.device)
    if digest_for(w_nk, packing) != rounding.weight:
        raise UserError(
            f"recipe of {rounding.site}: its weight is not the one that was {rounding}; it is of "
            "another model, or was trained, merged or converted since. Calibrate this model again, "
            "or without rounding"
        )
    return rounding.codes.to(w_nk.device)
