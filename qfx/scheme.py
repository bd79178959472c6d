"""Values that say how a matmul is quantized: QSpec (one operand) and Scheme (one site).

Frozen and hashable; legality is checked when a value is made; `str` is one token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PER_ROW = (1,)  # per token for activations, per output channel for weights
PER_TENSOR = (0, 1)
BACKWARD = ("float", "int8")
_AXES_LETTER = {PER_ROW: "r", PER_TENSOR: "t"}


@dataclass(frozen=True)
class QSpec:
    """How one operand, viewed as a matrix [rows, K], becomes integers: docs/numerics.md (Q1)-(Q3).

    `bits`: 2 to 8. `symmetric`: zero point 0 or not. `axes`: the tuple of axes of the matrix that
    are reduced away, `PER_ROW` or `PER_TENSOR`. Raises ValueError for anything else.
    """

    bits: int = 8
    symmetric: bool = True
    axes: tuple[int, ...] = PER_ROW

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"QSpec: bits={self.bits} is outside 2..8")
        if self.axes not in _AXES_LETTER:
            raise ValueError(
                f"QSpec: axes={self.axes} is neither (1,) per row nor (0, 1) per tensor"
            )

    def __str__(self) -> str:
        return f"{'s' if self.symmetric else 'a'}{self.bits}{_AXES_LETTER[self.axes]}"


@dataclass(frozen=True)
class Scheme:
    """How one site is quantized: its activation `x` (dynamic) and its weight `w` (symmetric).

    `backward`: the matmuls of its gradients, "float", or "int8" on stochastically rounded
    gradients. Raises ValueError for another word, and when the weight is asymmetric: the integer
    GEMM has no weight zero point.
    """

    x: QSpec = field(default_factory=QSpec)
    w: QSpec = field(default_factory=QSpec)
    backward: str = "float"

    def __post_init__(self) -> None:
        if not self.w.symmetric:
            raise ValueError(
                "Scheme: the weight must be symmetric, the GEMM has no weight zero point"
            )
        if self.backward not in BACKWARD:
            raise ValueError(f"Scheme: backward={self.backward!r} is none of {', '.join(BACKWARD)}")

    def __str__(self) -> str:
        return f"x{self.x}_w{self.w}{'_g8' if self.backward == 'int8' else ''}"
