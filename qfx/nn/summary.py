"""Summary: what became of each linear of a model, logged; a warning of what nobody asked for."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import NamedTuple

from tabulate import tabulate
from torch import nn
from torch.nn.parameter import is_lazy

from qfx.nn.selection import Selection, by_reason
from qfx.nn.weight_bytes import WeightBytes

log = logging.getLogger(__name__)


class LinearSummary(NamedTuple):
    """One linear: its name, in and out features, what stands there now, why it stayed float."""

    module: str
    shape: str
    now: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """What `who` did to a model; prints as a table. Bytes are of its parameters and buffers, before
    and after; `weights`: how many of them are quantized; `what`: a word for the modules."""

    who: str
    lines: tuple[LinearSummary, ...]
    bytes_before: int
    bytes_after: int
    weights: WeightBytes
    what: str = "linears"

    def __str__(self) -> str:
        table = tabulate(self.lines, ("module", "KxN", "now", "reason"), disable_numparse=True)
        replaced = sum(line.now != "float" for line in self.lines)
        count = f"{self.who}: {replaced} of {len(self.lines)} {self.what} replaced"
        sizes = f"{self.bytes_before / 1e6:,.2f} MB -> {self.bytes_after / 1e6:,.2f} MB"
        return f"{table}\n{count}, the model: {sizes}\n{self.weights}"


def bytes_of(model: nn.Module) -> int:
    """Of its parameters and buffers; those of lazy modules have no shape yet."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if not is_lazy(t))


def tell(summary: Summary, chosen: Selection) -> None:
    """Logs the summary, and warns once of what stays float though the config does not say so: of
    linears, and of other weights where less than half of those that multiply is quantized."""
    log.info("%s\n%s", summary.who, summary)
    said = [*_missed(summary, chosen), *_mostly_float(summary, chosen)]
    if said:
        hint = "logging.basicConfig(level=logging.INFO) shows what became of each linear"
        warnings.warn(f"qfx.{summary.who}: {'; '.join([*said, hint])}", stacklevel=4)


def _missed(summary: Summary, chosen: Selection) -> list[str]:
    if not chosen.missed:
        return []
    return [
        f"{len(chosen.missed)} of {len(summary.lines)} {summary.what} stay float without having "
        f"been left out: {by_reason(chosen.missed)}",
        "naming them in skip silences this",
    ]


def _mostly_float(summary: Summary, chosen: Selection) -> list[str]:
    said = "" if chosen.asked else summary.weights.mostly_float
    return [said, "qfx.Config(only=['*']) says that this is meant"] if said else []
