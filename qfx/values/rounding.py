"""Rounding: the int8 codes that calibration has chosen for a weight, and the digest of that
weight."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qfx.io.digest import digest_of
from qfx.io.errors import UserError

METHODS = {
    "gptq": "GPTQ",
    "gptq-sequential": "sequential GPTQ",
}  # methods of finding codes, and their names in messages


@dataclass(frozen=True, eq=False)
class Rounding:
    """The int8 codes of a weight that replace the codes rounded to nearest, found by (Q9) in
    docs/numerics.md.

    `site`: the name of the matmul in error messages. `method`: one of `METHODS`. `weight`: the
    `weight_digest` of the float weight. `codes`: int8 [N, K], or [E, N, K] of the weights of E
    experts, on the CPU, not to be written to. Two
    roundings with the same method and digests are equal. Raises ValueError for an unknown method, a
    digest that is no text, and codes of another dtype, rank or device.
    """

    site: str
    method: str
    weight: str
    codes: Tensor = field(repr=False)
    digest: str = field(init=False)  # of the codes

    def __post_init__(self) -> None:
        codes, of = self.codes, f"recipe of {self.site}"
        if self.method not in METHODS:
            raise UserError(f"{of}: rounded by {self.method!r}; there is {', '.join(METHODS)}")
        if not isinstance(self.weight, str):
            raise UserError(f"{of}: the digest {self.weight!r} of the weight is no text")
        if codes.dtype != torch.int8 or codes.dim() not in (2, 3) or codes.device.type != "cpu":
            raise UserError(
                f"{of}: its codes are {codes.dtype} {list(codes.shape)} on {codes.device}, "
                "expected int8 [N, K] or [E, N, K] on the CPU"
            )
        object.__setattr__(self, "digest", codes_digest(codes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rounding) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __str__(self) -> str:
        return f"rounded by {METHODS[self.method]}"

    @property
    def _identity(self) -> tuple[str, str, str]:
        return self.method, self.weight, self.digest

    @property
    def json_entry(self) -> dict[str, str]:
        """The entry of this rounding in the JSON of a recipe."""
        return {"method": self.method, "weight": self.weight, "codes": self.digest}


def codes_digest(codes: Tensor) -> str:
    return digest_of(f"codes {list(codes.shape)}", codes)


def weight_digest(w_nk: Tensor, how: str) -> str:
    """Returns the SHA-256 of the values of a float weight [N, K], as float32, and of `how` it is
    transformed and quantized. It is the same on every machine, whatever the weight's dtype, device
    and strides."""
    return digest_of(f"weight {list(w_nk.shape)} {how}", w_nk, dtype=torch.float32)
