"""Summary: the logged result for each linear of a model, and a warning about linears that stay
float unexpectedly."""

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
    """One linear: its name, K and N, its new module or "float", and the reason why it stayed
    float."""

    module: str
    shape: str
    now: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """The changes that `who` made to a model; prints as a table.

    `bytes_before` and `bytes_after`: bytes of its parameters and buffers. `weights`: how many bytes
    of weights are quantized. `what`: the noun for the modules.
    """

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
    """Returns the bytes of the parameters and buffers of a model, without those of lazy modules,
    which have no shape yet."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if not is_lazy(t))


def report(summary: Summary, chosen: Selection) -> None:
    """Logs the summary, and warns once if weights stay float although the config does not say so:
    linears, or other weights if less than half of the weights that multiply are quantized."""
    log.info("%s\n%s", summary.who, summary)
    lines = [*_missed(summary, chosen), *_mostly_float(summary, chosen)]
    if lines:
        hint = "logging.basicConfig(level=logging.INFO) shows what became of each linear"
        warnings.warn(f"qfx.{summary.who}: {'; '.join([*lines, hint])}", stacklevel=4)


def _missed(summary: Summary, chosen: Selection) -> list[str]:
    if not chosen.missed:
        return []
    return [
        f"{len(chosen.missed)} of {len(summary.lines)} {summary.what} stay float without having "
        f"been left out: {by_reason(chosen.missed)}",
        "naming them in skip silences this",
    ]


def _mostly_float(summary: Summary, chosen: Selection) -> list[str]:
    warning = "" if chosen.selective else summary.weights.mostly_float
    return [warning, "qfx.Config(only=['*']) turns this warning off"] if warning else []
