"""Reads a scheme from JSON that `dataclasses.asdict` produced."""

from __future__ import annotations

from typing import Any

from qfx.values.scheme import QSpec, Scheme


def scheme_from(raw: dict[str, Any]) -> Scheme:
    """Returns the scheme of parsed JSON. Raises TypeError, KeyError, AttributeError or ValueError
    if `raw` is no scheme."""
    x = None if raw["x"] is None else _spec(raw["x"])
    return Scheme(**{**raw, "x": x, "w": _spec(raw["w"])})


def _spec(raw: dict[str, Any]) -> QSpec:
    return QSpec(**{**raw, "axes": tuple(list_of(raw["axes"]))})


def list_of(raw: Any) -> list[Any]:
    if not isinstance(raw, list):
        raise TypeError(f"{raw!r} is no list")
    return raw
