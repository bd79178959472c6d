"""Int8 codes that a recipe contains for a weight, and the check that they belong to this weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qfx.host.tensors import has_values
from qfx.io.digest import digest_of
from qfx.io.errors import UserError
from qfx.ops.packing import Packing
from qfx.values.rounding import Rounding, weight_digest


def digest_for(w_nk: Tensor, packing: Packing) -> str:
    """Returns the digest by which codes in a recipe refer to their weight w_nk [N, K]: of its
    values, of how it is transformed, and of what determines its scales. That of the weights [E, N,
    K] of experts is the digest of the digests of all."""
    if w_nk.dim() == 3:
        return digest_of_experts(digest_for(w, packing) for w in w_nk)
    how = (str(packing.spec), packing.factor, packing.rotation, packing.outliers)
    return weight_digest(w_nk, repr(how))


def digest_of_experts(digests: Iterable[str]) -> str:
    """Returns the digest of the weights of all experts of a product, from those of each."""
    return digest_of("experts", *digests)


def codes_of(w_nk: Tensor, packing: Packing, rounding: Rounding) -> Tensor:
    """Returns the codes of `rounding`, int8 of the shape of the weight, on its device; a tensor
    without meaning if the weight has no values.

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
