"""Checks the names and goals among the arguments of a calibration, and lists the schemes to try."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qfx.calibration.losses import LOSSES, Loss
from qfx.calibration.record import SharedInput
from qfx.calibration.search import Candidate
from qfx.io.errors import UserError
from qfx.match.selection import SiteKey
from qfx.values.config import Config
from qfx.values.scheme import PER_ROW, Scheme


def check_names_of(*given: tuple[str, str, Iterable[str]]) -> None:
    for what, name, known in given:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(known)}")


def check_goal(
    divergence: float | None, bits: float | None, loss: Loss | None, metric: Any
) -> None:
    if isinstance(loss, str):
        check_names_of(("loss", loss, LOSSES))
    goals = {"metric": metric, "max_divergence": divergence, "max_bits": bits}
    named_goals = [name for name, value in goals.items() if value is not None]
    if loss is not None and not set(named_goals) & {"max_divergence", "max_bits"}:
        raise ValueError("calibrate: a loss serves max_divergence or max_bits; neither is given")
    if len(named_goals) > 1:
        raise ValueError(f"calibrate: {' and '.join(named_goals)} are given, expected one of them")
    if divergence is not None and not divergence >= 0:
        raise ValueError(f"calibrate: max_divergence={divergence} is not at least 0")
    if bits is not None and not bits > 0:
        raise ValueError(f"calibrate: max_bits={bits} is not above 0")


def checked_bytes(
    bits: float | None,
    groups: Mapping[SiteKey, SharedInput],
    found: Sequence[Sequence[Candidate]],
) -> float:
    """Returns the number of bytes that all weights may take at `bits` bits per element.

    Raises ValueError if even the smallest candidates take more.
    """
    assert bits is not None
    elements = sum(r.w_nk.numel() for group in groups.values() for r in group.readers)
    least = sum(min(c.bytes for c in each) for each in found)
    if least > elements * bits / 8:
        raise UserError(
            f"calibrate: max_bits={bits}, and the schemes that are tried take at least "
            f"{8 * least / elements:.2f} bits an element, scales included"
        )
    return elements * bits / 8


def ladder_of(config: Config, also: Sequence[str | Scheme]) -> tuple[Scheme, ...]:
    """Returns the schemes to try: the scheme of the config, for a static preset also the same
    scheme with dynamic scales per token, and those in `also`."""
    chosen = config.chosen
    more = [replace(config, scheme=scheme).chosen for scheme in also]
    if isinstance(config.scheme, str) and chosen.x is not None and chosen.x.static:
        more.insert(0, replace(chosen, x=replace(chosen.x, static=False, axes=PER_ROW)))
    return tuple(dict.fromkeys((chosen, *more)))
