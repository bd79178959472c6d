"""Values that define how a matmul is quantized: QSpec for one operand, Scheme for both.

They are frozen and hashable, and invalid combinations raise an error on creation. `str` gives a
short name without spaces, such as `xa8r_ws8r_h64`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

PER_ROW = (1,)  # per token for activations, per output channel for weights
PER_TENSOR = (0, 1)
PER_COLUMN = (0,)  # per in feature: folded into the other operand, docs/numerics.md (R1)
BACKWARD = ("float", "int8")
ROTATIONS = (0, 16, 64)  # sizes of the largest blocks in which K may be rotated
GROUP_MULTIPLE = 32
PACKED_BITS, PACKED_GROUPS = (4, 5), (32, 64, 128)  # combinations that have kernels
_AXES_LETTER = {PER_ROW: "r", PER_TENSOR: "t", PER_COLUMN: "c"}


@dataclass(frozen=True)
class QSpec:
    """The quantization of one operand, viewed as a matrix [rows, K]: docs/numerics.md (Q1)-(Q3).

        weights = qfx.QSpec(bits=4, symmetric=False, group=64, packed=True)

    `bits`: 2 to 8. `symmetric`: whether the zero point is 0. `axes`: the tuple of axes of the
    matrix that are reduced away, `PER_ROW`, `PER_TENSOR` or `PER_COLUMN`. `group`: how many
    elements of a row share a scale, a multiple of 32 (on CUDA of 64), or 0 for all. `static`:
    whether the scale is fixed in advance by a `Recipe`. `packed`: whether the codes of a weight (4
    or 5 bits, in groups of 32, 64 or 128) are stored in 4 or 5 bits instead of 8, and their scales
    in 16 bits instead of 32. `str` gives `s8r`, `a8t`, `s4g64`, with a capital if static, `s4p64`
    if packed. Raises ValueError for anything else, TypeError for other types.
    """

    bits: int = 8
    symmetric: bool = True
    axes: tuple[int, ...] = PER_ROW
    group: int = 0
    static: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        flags = dict.fromkeys(("symmetric", "static", "packed"), bool)
        _check_types("QSpec", self, bits=int, axes=tuple, group=int, **flags)
        if not 2 <= self.bits <= 8:
            raise ValueError(f"QSpec: bits={self.bits} is outside 2..8")
        if any(type(axis) is not int for axis in self.axes) or self.axes not in _AXES_LETTER:
            raise ValueError(
                f"QSpec: axes={self.axes} is neither (1,) per row nor (0, 1) per tensor nor (0,) "
                "per column"
            )
        if self.group < 0 or self.group % GROUP_MULTIPLE:
            raise ValueError(f"QSpec: group={self.group} is no multiple of {GROUP_MULTIPLE}")
        if self.group and self.axes != PER_ROW:
            raise ValueError(f"QSpec: group={self.group} cuts rows, but axes={self.axes}")
        if self.static and self.axes == PER_ROW:
            raise ValueError("QSpec: a static scale is per tensor or per column, not per row")
        if self.packed and (self.bits not in PACKED_BITS or self.group not in PACKED_GROUPS):
            raise ValueError(
                f"QSpec: codes of bits={self.bits} in groups of {self.group} cannot be packed: "
                "there are kernels for 4 and 5 bits in groups of 32, 64 and 128"
            )

    @property
    def grouped(self) -> bool:
        """Whether a row has several scales, or zero points."""
        return bool(self.group) or not self.symmetric

    def __str__(self) -> str:
        group = f"{'p' if self.packed else 'g'}{self.group}"
        letter = group if self.group else _AXES_LETTER[self.axes]
        kind = f"{'s' if self.symmetric else 'a'}{self.bits}"
        return kind + (letter.upper() if self.static else letter)


@dataclass(frozen=True)
class Scheme:
    """The quantization of one matmul: of its activation `x` and its weight `w`.

        config = qfx.Config(scheme=qfx.Scheme(x=qfx.QSpec(symmetric=False), rotation=64))

    `x` None: the activation stays float, only the weight is int8. If both have groups, the sizes
    are equal. `backward`: the matmuls of its gradients, "float", or "int8" on stochastically
    rounded gradients. `rotation`: the size of the blocks in which K is rotated, 0 (no rotation), 16
    or 64. What is left of K is rotated in smaller blocks (docs/numerics.md (R1)). Raises ValueError
    for combinations that no operator supports, TypeError for other types.
    """

    x: QSpec | None = field(default_factory=QSpec)
    w: QSpec = field(default_factory=QSpec)
    backward: str = "float"
    rotation: int = 0

    def __post_init__(self) -> None:
        _check_types("Scheme", self, backward=str, rotation=int, w=QSpec)
        if self.x is not None:
            _check_types("Scheme", self, x=QSpec)
        if self.backward not in BACKWARD:
            raise ValueError(f"Scheme: backward={self.backward!r} is none of {', '.join(BACKWARD)}")
        if self.rotation not in ROTATIONS:
            raise ValueError(f"Scheme: rotation={self.rotation} is none of 0, 16, 64")
        _check_weight(self.w)
        if self.x is None:
            _check_weight_only(self.w)
        else:
            _check_activation(self.x, self.w)
            _check_groups(self.x, self.w)

    def __deepcopy__(self, memo: Any) -> Scheme:
        return self  # frozen; guards of compiled graphs compare it at each call

    @property
    def group(self) -> int:
        """The number of elements of K that are summed separately, as required by the scales of x or
        w; 0 if no operand has groups."""
        return self.w.group or (self.x.group if self.x else 0)

    def block(self, k: int | None, channels: int | None = None) -> int:
        """Returns the rotation of `k` features: 0 if `k` is not known, or is too small for a block.

        `channels`: of a pixel, if the features are windows of pixels. A rotation that divides them
        comes before one that does not, because then pixels are rotated once for all windows.
        """
        if k is None or k < 2:
            return 0
        return _largest_fitting(self.rotation, channels) or self.rotation

    def at(self, k: int | None, channels: int | None = None) -> Scheme:
        """Returns the scheme for a matmul of `k` features, with the rotation of `block`."""
        return replace(self, rotation=self.block(k, channels))

    @property
    def calibrated(self) -> bool:
        """Whether the scheme needs values that only a recipe has."""
        return self.x is not None and self.x.static

    @property
    def smooths(self) -> bool:
        """Whether smoothing factors can multiply x in a pass over x that exists anyway: x is
        rotated, and its scales are dynamic."""
        return self.x is not None and not self.x.static and self.rotation != 0

    @property
    def fits_activations(self) -> bool:
        """Whether a matmul of two activations can be quantized by this scheme, with scales that are
        computed at each call."""
        plain = not (self.w.grouped or self.group)
        plain = plain and PER_COLUMN not in (self.w.axes, self.x and self.x.axes)
        return self.x is not None and not self.x.static and plain

    def __str__(self) -> str:
        x = "" if self.x is None else f"x{self.x}_"
        g8 = "_g8" if self.backward == "int8" else ""
        return f"{x}w{self.w}{g8}{f'_h{self.rotation}' if self.rotation else ''}"


def _check_types(what: str, value: Any, **types: type) -> None:
    """Raises TypeError for values of other types. 8.0 equals 8 and True equals 1, but no operator
    accepts them."""
    for name, wanted in types.items():
        given = getattr(value, name)
        if type(given) is not wanted:
            raise TypeError(f"{what}: {name}={given!r} is no {wanted.__name__}")


def _check_weight(w: QSpec) -> None:
    if w.static:
        raise ValueError("Scheme: the weight is known, so its scale cannot be static")
    if not w.symmetric and w.axes != PER_ROW:
        raise ValueError(f"Scheme: the weight {w} has zero points, so it must be per row")


def _check_weight_only(w: QSpec) -> None:
    if w.grouped and not w.packed:
        raise ValueError(
            f"Scheme: float activations need a weight with one scale for each row and no zero "
            f"point, or a packed one, not {w}"
        )


def _check_activation(x: QSpec, w: QSpec) -> None:
    if x.packed:
        raise ValueError(f"Scheme: codes of weights are packed, not of activations: {x}")
    if x.axes == PER_COLUMN and not x.static:
        raise ValueError("Scheme: an activation per column is static: its scales are folded away")
    if x.axes == w.axes == PER_COLUMN:
        raise ValueError("Scheme: only one operand can be per column, the other takes its scales")


def _check_groups(x: QSpec, w: QSpec) -> None:
    if x.group and w.group and x.group != w.group:
        raise ValueError(
            f"Scheme: the activation has groups of {x.group} and the weight of {w.group}; where "
            "both have groups, these are equal"
        )
    if x.group and w.axes != PER_ROW:
        raise ValueError(
            f"Scheme: the activation {x} needs a weight with a scale for each row or group, not {w}"
        )


def _largest_fitting(rotation: int, k: int | None) -> int:
    """Returns the largest of ROTATIONS up to this one that divides `k`, 0 for none."""
    fitting = (b for b in ROTATIONS[1:] if b <= rotation and k and k % b == 0)
    return max(fitting, default=0)


def rotation_of_earlier(scheme: Scheme, k: int) -> Scheme:
    """Returns the scheme as earlier builds of qfx understood it for `k` features: they rotated in
    blocks that divide K, the largest up to `scheme.rotation`, or not at all."""
    return replace(scheme, rotation=_largest_fitting(scheme.rotation, k))


def scheme_from(raw: dict[str, Any]) -> Scheme:
    """Returns the scheme of parsed JSON that `dataclasses.asdict` produced. Raises TypeError,
    KeyError, AttributeError or ValueError if `raw` is no scheme."""
    x = None if raw["x"] is None else _spec_from(raw["x"])
    return Scheme(**{**raw, "x": x, "w": _spec_from(raw["w"])})


def _spec_from(raw: dict[str, Any]) -> QSpec:
    return QSpec(**{**raw, "axes": tuple(list_of(raw["axes"]))})


def list_of(raw: Any) -> list[Any]:
    if not isinstance(raw, list):
        raise TypeError(f"{raw!r} is no list")
    return raw
