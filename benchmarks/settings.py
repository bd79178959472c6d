"""The settings of qfx that benchmarks/accuracy.py compares, in the order of docs/results.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qfx.values.scheme import Scheme


@dataclass(frozen=True)
class Setting:
    """Options of the backend. With a `rounding` they are those of a calibration, whose recipe is
    then passed to the backend; models with no inputs to spare have no such row."""

    options: Mapping[str, Any] = field(default_factory=dict)
    rounding: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)  # of `qfx.calibrate` besides


def _preset(name: str, rounding: str = "") -> Setting:
    return Setting({"scheme": name}, rounding)


SETTINGS = {
    "w8a8": _preset("w8a8"),
    "w8a8-unsmoothed": Setting({"smoothing": False}),
    "rotated-symmetric": Setting({"scheme": Scheme(rotation=64)}),
    "w8a8-groups": _preset("w8a8-groups"),
    "w8a8-asymmetric": _preset("w8a8-asymmetric"),
    "w8a8-symmetric": _preset("w8a8-symmetric"),
    "w7a7": _preset("w7a7"),
    "w5a8": _preset("w5a8"),
    "w4a8": _preset("w4a8"),
    "w8a8 calibrated": _preset("w8a8", "nearest"),
    "w8a8 calibrated gptq": _preset("w8a8", "gptq"),
    "w8a8-groups calibrated": _preset("w8a8-groups", "nearest"),
    "w8a8-groups calibrated gptq": _preset("w8a8-groups", "gptq"),
    "w8a8-static calibrated": _preset("w8a8-static", "nearest"),
    "w7a7 calibrated": _preset("w7a7", "nearest"),
    "w7a7 calibrated gptq": _preset("w7a7", "gptq"),
    "w5a8 calibrated": _preset("w5a8", "nearest"),
    "w5a8 calibrated gptq": _preset("w5a8", "gptq"),
    "w4a8 calibrated": _preset("w4a8", "nearest"),
    "w4a8 and w8a8 in 5.3 bits calibrated gptq": Setting(
        {"scheme": "w4a8"}, "gptq", {"also": ["w8a8"], "max_bits": 5.3}
    ),
    "w4a8 calibrated gptq": _preset("w4a8", "gptq"),
}
PLAIN = [name for name, setting in SETTINGS.items() if not setting.rounding]
