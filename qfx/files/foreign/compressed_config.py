"""Reads the config.json of a compressed-tensors folder: which linears are quantized, and to which
format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfx.files.foreign.weight import ForeignGrid
from qfx.io.errors import UserError, printable
from qfx.io.safe_read import bytes_of, parsed
from qfx.values.scheme import QSpec

METHOD = "compressed-tensors"
FORMATS = ("int-quantized", "pack-quantized")
PACKED_BITS = (4, 8)  # earlier versions store other widths in another layout
LARGEST = 2**26  # largest size in bytes of a config.json, or of an index of files


@dataclass(frozen=True)
class Group:
    """One of the `config_groups` of config.json. `targets`: names, patterns or classes of its
    linears. `grid`: the format of their weights. `x`: how their activations are quantized.
    `packed`: whether integers are packed into words of 32 bits."""

    targets: tuple[str, ...]
    grid: ForeignGrid
    x: QSpec | None
    packed: bool

    @property
    def kind(self) -> str:
        return FORMATS[self.packed]


@dataclass(frozen=True)
class CompressedConfig:
    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    def group_of(self, name: str, classes: tuple[str, ...]) -> Group | None:
        """Returns the group of the module with this name and the names of its classes; None if the
        module is in no group or ignored."""
        if any(_means(target, name, classes) for target in self.ignore):
            return None
        for which in ((name,), classes):  # names take precedence over classes
            for group in self.groups:
                if any(_means(target, *_split(which, name)) for target in group.targets):
                    return group
        return None


def _split(which: tuple[str, ...], name: str) -> tuple[str, tuple[str, ...]]:
    return (name, ()) if which == (name,) else ("", which)


def _means(target: str, name: str, classes: tuple[str, ...]) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == name or target in classes


def method_of(folder: Path) -> str | None:
    """Returns the quant_method of config.json, or None."""
    settings = _config(folder).get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return method if isinstance(method, str) else None


def compressed_config(folder: Path) -> CompressedConfig:
    """Reads the config.json of a folder. Raises UserError, which names the file, for options that
    qfx does not support."""
    path = folder / "config.json"
    return _ConfigReader(printable(str(path))).whole(_config(folder)["quantization_config"])


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    at = printable(str(path))
    raw = parsed(bytes_of(path, LARGEST).decode("utf-8", "replace"), at)
    if not isinstance(raw, dict):
        raise UserError(f"{at} is no object of JSON")
    return raw


class _ConfigReader:
    def __init__(self, at: str) -> None:
        self.at = at

    def refuse(self, what: str, value: Any) -> UserError:
        return UserError(
            f"{self.at}: {what} is {printable(repr(value))[:200]}, which qfx.load does not read"
        )

    def whole(self, raw: Mapping[str, Any]) -> CompressedConfig:
        for unread in ("kv_cache_scheme", "transform_config"):
            if raw.get(unread):
                raise self.refuse(unread, raw[unread])
        sparse = raw.get("sparsity_config")
        if sparse and (not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense"):
            raise self.refuse("sparsity_config", sparse)
        if raw.get("quantization_status", "compressed") != "compressed":
            raise self.refuse("quantization_status", raw["quantization_status"])
        groups = raw.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise self.refuse("config_groups", groups)
        found = [self.group(name, each, raw.get("format")) for name, each in groups.items()]
        return CompressedConfig(tuple(found), self.texts("ignore", raw.get("ignore") or []))

    def texts(self, what: str, raw: Any) -> tuple[str, ...]:
        if not isinstance(raw, list) or not all(isinstance(text, str) for text in raw):
            raise self.refuse(what, raw)
        for text in raw:
            if text.startswith("re:"):
                self.pattern(what, text)
        return tuple(raw)

    def pattern(self, what: str, text: str) -> None:
        try:
            re.compile(text[3:])
        except (re.error, RecursionError, OverflowError) as why:
            raise UserError(f"{self.at}: {what} has the pattern {printable(text)}: {why}") from None

    def group(self, name: str, raw: Any, whole_format: Any) -> Group:
        here = printable(f"config_groups.{name}")
        if not isinstance(raw, dict):
            raise self.refuse(here, raw)
        form = raw.get("format") or whole_format
        if form not in FORMATS:
            raise self.refuse(f"the format of {here}", form)
        if raw.get("output_activations"):
            raise self.refuse(f"{here}.output_activations", raw["output_activations"])
        targets = self.texts(f"{here}.targets", raw.get("targets"))
        packed = form == FORMATS[1]
        grid = self.weights(f"{here}.weights", raw.get("weights"), packed)
        x = self.activations(f"{here}.input_activations", raw.get("input_activations"))
        return Group(targets, grid, x, packed)

    def weights(self, what: str, raw: Any, packed: bool) -> ForeignGrid:
        bits, symmetric, strategy = self.args(what, raw)
        if strategy not in ("channel", "group") or raw.get("dynamic"):
            raise self.refuse(what, raw)
        if (bits not in PACKED_BITS) if packed else bits != 8:
            raise self.refuse(f"{what}.num_bits", bits)
        group = raw.get("group_size") if strategy == "group" else 0
        if type(group) is not int or not 0 <= group < 2**31 or (strategy == "group" and not group):
            raise self.refuse(f"{what}.group_size", group)
        if raw.get("actorder") not in (None, False, "weight", "static"):
            raise self.refuse(f"{what}.actorder", raw["actorder"])
        return ForeignGrid(bits, group, zeros=not symmetric)

    def activations(self, what: str, raw: Any) -> QSpec | None:
        """Returns the dynamic quantization of activations, equation (Q1) or (Q2). Returns None if
        the file does not mention one: its activations are floats, and qfx quantizes them to int8 as
        usual."""
        if raw is None:
            return None
        bits, symmetric, strategy = self.args(what, raw)
        if strategy != "token" or raw.get("dynamic") is not True or bits != 8:
            raise self.refuse(what, raw)
        return QSpec(symmetric=symmetric)

    def args(self, what: str, raw: Any) -> tuple[int, bool, str]:
        if not isinstance(raw, dict) or raw.get("type", "int") != "int":
            raise self.refuse(what, raw)
        bits, symmetric = raw.get("num_bits", 8), raw.get("symmetric", True)
        if type(bits) is not int or type(symmetric) is not bool:
            raise self.refuse(what, raw)
        return bits, symmetric, str(raw.get("strategy"))
