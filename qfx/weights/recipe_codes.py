"""Codes that a recipe contains for a weight, and the check that they belong to this weight."""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.host.tensors import has_values
from qfx.io.errors import UserError
from qfx.ops.packing import Packing
from qfx.values.rounding import Rounding, weight_digest


def digest_for(w_nk: Tensor, packing: Packing) -> str:
    """Returns a digest that identifies the weight for its codes: of its values, how it is
    transformed and what determines its scales."""
    how = (str(packing.spec), packing.factor, packing.rotation, packing.outliers)
    return weight_digest(w_nk, repr(how))


def codes_of(w_nk: Tensor, packing: Packing, rounding: Rounding) -> Tensor:
    """Returns the codes, int8 [N, K], on the device of the weight; without values if the weight has
    none.

    Raises ValueError if the codes were computed for another weight.
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
