"""Summary: what became of each linear of a model, logged; a warning of what nobody asked for."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tabulate import tabulate
from torch import nn
from torch.nn.parameter import is_lazy

from qfx.nn.chosen import by_reason

log = logging.getLogger(__name__)


class Line(NamedTuple):
    """One linear: its name, in and out features, what stands there now, why it stayed float."""

    module: str
    shape: str
    now: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """What `who` did to a model; prints as a table. Bytes are of its parameters and buffers."""

    who: str
    lines: tuple[Line, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        table = tabulate(self.lines, ("module", "KxN", "now", "reason"), disable_numparse=True)
        replaced = sum(line.now != "float" for line in self.lines)
        count = f"{self.who}: {replaced} of {len(self.lines)} linears replaced"
        sizes = f"{self.bytes_before / 1e6:,.2f} MB -> {self.bytes_after / 1e6:,.2f} MB"
        return f"{table}\n{count}, the model: {sizes}"


def bytes_of(model: nn.Module) -> int:
    """Of its parameters and buffers; those of lazy modules have no shape yet."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if not is_lazy(t))


def tell(summary: Summary, missed: Mapping[str, str]) -> None:
    """Logs the summary, and warns of linears that stayed float though nothing was said of them."""
    log.info("%s\n%s", summary.who, summary)
    if missed:
        warnings.warn(
            f"qfx.{summary.who}: {len(missed)} of {len(summary.lines)} linears stay float without "
            f"having been left out: {by_reason(missed)}. Naming them in skip silences this; "
            "logging.basicConfig(level=logging.INFO) shows what became of each linear",
            stacklevel=4,
        )
