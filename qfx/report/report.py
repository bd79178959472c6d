"""Report: the findings of `explain` about a model, printed as a table or written as a page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from qfx.io.atomic_write import write_text
from qfx.io.errors import printable
from qfx.match.base import FLOAT
from qfx.nn.attention_gradients import CLOSE
from qfx.nn.weight_bytes import WeightBytes, kinds
from qfx.report.html import page
from qfx.report.plain_report import plain_report
from qfx.report.report_row import Row, float_rows, shares
from qfx.report.weights_read import WeightsRead, weights_read
from qfx.report.whole_model import WholeModel


@dataclass(frozen=True)
class Report:
    """The findings of `explain`; prints as a table.

    `rows`: one row for each matmul. `graphs`: the number of graphs that the model was cut into.
    `training`: the modules in training mode, as words; '' if there are none. `breaks`: Dynamo's
    messages about code that it did not capture. `macs`: the multiply-accumulates of the int8
    matmuls, those of all matmuls, and the number of matmuls that are not counted. `weights`: the
    bytes of the model's weights. `beside`: the bytes of weights that multiply in none of the rows,
    such as convolutions and experts. `weights` and `beside` are None if a function was explained.
    `whole`: output and time of a whole call. `notes`: sentences that say, for a quantized model,
    with what its rows are compared.
    """

    rows: tuple[Row, ...]
    graphs: int
    training: str = ""
    breaks: tuple[str, ...] = ()
    macs: tuple[int, int, int] = (0, 0, 0)
    weights: WeightBytes | None = None
    beside: WeightBytes | None = None
    whole: WholeModel | None = None
    notes: tuple[str, ...] = ()

    @property
    def quantized(self) -> int:
        """The number of matmuls in int8."""
        return sum(r.scheme != FLOAT and not r.lookup for r in self.rows)

    @property
    def total(self) -> int:
        """The number of matmuls."""
        return sum(not r.lookup for r in self.rows)

    @property
    def shares(self) -> tuple[float | None, ...]:
        """The share of each row, 0 to 1, in the total error of the matmuls that ran in int8; None
        if unknown. The error is the divergence that a recipe predicts, or else noise power relative
        to signal."""
        return shares(self.rows)

    @property
    def last_rows(self) -> tuple[Row, ...]:
        """The row of the whole model, which follows the rows of the matmuls; nothing if the whole
        model was not measured."""
        if self.whole is None or not self.whole.measured:
            return ()
        read = self.weights_read
        row = self.whole.row
        return (row if read is None else replace(row, weight_bytes=read.stored, bits=read.bits),)

    @property
    def far_gradients(self) -> tuple[str, ...]:
        """The names of the attentions whose int8 gradients have a cosine below 0.995 with those in
        float, for the option `skip`, which leaves them float. Empty without backward="int8", with
        which alone they are measured."""
        cosines = ((row.module, row.gradient_cosine) for row in self.rows)
        far = (name for name, cosine in cosines if cosine is not None and cosine < CLOSE)
        return tuple(dict.fromkeys(filter(None, far)))

    @property
    def weights_read(self) -> WeightsRead | None:
        """The bytes of the weights that a call reads, as they are stored and in float; None if no
        weight is known."""
        return weights_read(self.rows, self.weights, self.beside)

    @property
    def of_whole(self) -> tuple[str, ...]:
        """Lines about the whole model: its output and times, and its choices of experts."""
        return (str(self.whole), self.whole.routing_text) if self.whole else ()

    @property
    def mode(self) -> str:
        """A note if the model was in training mode, otherwise ''."""
        return f"{self.training} in training mode: {_TRAINING}" if self.training else ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers of the report as plain values, which `json.dump` writes. Times are in
        seconds, shares 0 to 1, SQNR in dB. None is what is unknown, and an SQNR without any error,
        since JSON has no infinity."""
        return plain_report(self)

    def save_html(self, path: str | Path) -> None:
        """Writes the report to one HTML file that needs no others: a table, and charts of errors,
        inputs and times. Raises ImportError without jinja2 and matplotlib (`qfx[report]`), and
        OSError if the file cannot be written; an earlier file then stays unchanged."""
        write_text(path, page(self))

    def __str__(self) -> str:
        guarded = any(row.guarded for row in self.rows)
        pairs = zip(self.rows, self.shares, strict=True)
        lines = [_printed(*pair, guarded) for pair in pairs]
        lines += [_printed(row, None, guarded) for row in self.last_rows]
        table = [{head: printable(cell) for head, cell in line.items()} for line in lines]
        text = tabulate(table, headers="keys", disable_numparse=True)
        note = "times: measured on this input; ~ predicted by the cost model"
        count = f"{self.quantized} of {self.total} matmuls in int8, {self.graphs} graph(s)"
        breaks = [_BREAKS, *map(printable, self.breaks)] if self.breaks else []
        weights = "" if self.weights_read is None else str(self.weights_read)
        footer = (
            text,
            note,
            *self.notes,
            *self.of_whole,
            self.mode,
            *breaks,
            weights,
            self._int8,
            count,
        )
        return "\n".join(line for line in footer if line)

    @property
    def _int8(self) -> str:
        """A line that says which share of the whole model is int8."""
        parts = []
        if self.weights is not None and self.weights.total:
            parts.append(f"{self.weights.share:.1%} of the bytes of weights that multiply")
        if self.macs[1]:
            unknown = (
                f" without {self.macs[2]} matmuls that PyTorch does not count"
                if self.macs[2]
                else ""
            )
            share = self.macs[0] / self.macs[1]
            parts.append(f"{share:.1%} of {self.macs[1]:,} multiply-adds{unknown}")
        stays = self.weights.multiplying if self.weights else {}
        float_ = f"; float: {kinds(stays)}" if stays else ""
        return f"int8: {', '.join(parts)}{float_}" if parts else ""


_TRAINING = "what dropout and batch statistics do is in these numbers; eval() is for inference"
_BREAKS = 'Dynamo does not capture all of the code; TORCH_LOGS="graph_breaks" shows where. It says:'


def _printed(row: Row, share: float | None, guarded: bool) -> dict[str, str]:
    return {
        "module": row.module,
        "node": row.node,
        "MxKxN": row.shape,
        "scheme": row.scheme,
        "bits": "" if row.bits is None else f"{row.bits:.1f}",
        "transform": row.transform,
        "kernel": row.kernel,
        "max/rms": "" if row.outlier_ratio is None else f"{row.outlier_ratio:.1f}",
        "SQNR dB": "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
        "share": "" if share is None else f"{share:.1%}",
        **({"float rows": float_rows(row)} if guarded else {}),
        "float us": _us(row, row.float_s),
        "int8 us": _us(row, row.int8_s),
        "reason": row.reason,
    }


def _us(row: Row, seconds: float | None) -> str:
    return "" if seconds is None else f"{'' if row.measured else '~'}{seconds * 1e6:.0f}"
