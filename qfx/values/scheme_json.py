"""A scheme out of JSON, as `dataclasses.asdict` made it."""

from __future__ import annotations

from typing import Any

from qfx.values.scheme import QSpec, Scheme


def scheme_from(raw: dict[str, Any]) -> Scheme:
    """Raises TypeError, KeyError, AttributeError or ValueError for what is no scheme."""
    x = None if raw["x"] is None else _spec(raw["x"])
    return Scheme(**{**raw, "x": x, "w": _spec(raw["w"])})


def _spec(raw: dict[str, Any]) -> QSpec:
    return QSpec(**{**raw, "axes": tuple(list_of(raw["axes"]))})


def list_of(raw: Any) -> list[Any]:
    if not isinstance(raw, list):
        raise TypeError(f"{raw!r} is no list")
    return raw
