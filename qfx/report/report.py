"""explain: every matmul of a model on given inputs: int8 or why not, kernel, error, time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate
from torch import fx, nn

from qfx.cost.device_models import current_costs
from qfx.cost.model import Costs
from qfx.dynamo_backend.captured_graphs import watch
from qfx.graph.capture import parameter_name
from qfx.host.dynamo import uncompiled_module
from qfx.io.atomic_write import write_text
from qfx.io.printable import printable
from qfx.match.operator_calls import BINARY
from qfx.nn import BinaryLinear, Linear, LSQLinear, SignLinear
from qfx.nn.weight_bytes import WeightBytes, kinds, weight_bytes
from qfx.pipeline import Context, run_passes
from qfx.report.breaks import BEFORE, said, said_since
from qfx.report.html import page
from qfx.report.report_row import Row, float_rows, shares
from qfx.report.side_by_side import SideBySide
from qfx.values.config import Config, Configurable, parse_options
from qfx.values.select import check_names, names_in
from qfx.weights.model_restore import in_training, unchanged


@dataclass(frozen=True)
class Report:
    """What `explain` found; prints as a table. `graphs`: how many graphs the model was cut into.
    `training`: which of its modules were in training mode, as words; '' where none was. `breaks`:
    what Dynamo said of the code that it did not capture. `macs`:
    multiply-accumulates of what the plan makes int8, of all that the graphs do, and how many
    matmuls are not counted. `weights`: bytes of the model's weights, and `beside`: those that
    multiply in none of the rows, as convolutions and experts; None of a function."""

    rows: tuple[Row, ...]
    graphs: int
    training: str = ""
    breaks: tuple[str, ...] = ()
    macs: tuple[int, int, int] = (0, 0, 0)
    weights: WeightBytes | None = None
    beside: WeightBytes | None = None

    @property
    def quantized(self) -> int:
        return sum(r.scheme != "float" for r in self.rows)

    @property
    def total(self) -> int:
        return len(self.rows)

    @property
    def shares(self) -> tuple[float | None, ...]:
        """For each row its share of the total error, summed over the sites that ran in int8: of the
        divergence that a recipe predicts, else of noise power relative to signal. None where it is
        unknown."""
        return shares(self.rows)

    @property
    def mode(self) -> str:
        """What a reader must know of the mode that the model was in."""
        return f"{self.training} in training mode: {_TRAINING}" if self.training else ""

    def save_html(self, path: str | Path) -> None:
        """Writes the report to one HTML file that needs nothing else: table and charts of errors,
        inputs and times. Raises ImportError without jinja2 and matplotlib (`qfx[report]`), OSError
        where it cannot be written, and leaves an earlier file as it was."""
        write_text(path, page(self))

    def __str__(self) -> str:
        guarded = any(row.guarded for row in self.rows)
        pairs = zip(self.rows, self.shares, strict=True)
        lines = [_printed(*pair, guarded) for pair in pairs]
        table = [{head: printable(cell) for head, cell in line.items()} for line in lines]
        text = tabulate(table, headers="keys", disable_numparse=True)
        note = "times: measured on this input; ~ predicted by the cost model"
        count = f"{self.quantized} of {self.total} matmuls in int8, {self.graphs} graph(s)"
        said = [_SAID, *map(printable, self.breaks)] if self.breaks else []
        weights = _weights(self.rows, self.beside)
        footer = (text, note, self.mode, *said, weights, self._int8, count)
        return "\n".join(line for line in footer if line)

    @property
    def _int8(self) -> str:
        """A line on how much of the whole model is int8."""
        said = []
        if self.weights is not None and self.weights.total:
            said.append(f"{self.weights.share:.1%} of the bytes of weights that multiply")
        if self.macs[1]:
            unknown = (
                f" without {self.macs[2]} matmuls that PyTorch does not count"
                if self.macs[2]
                else ""
            )
            share = self.macs[0] / self.macs[1]
            said.append(f"{share:.1%} of {self.macs[1]:,} multiply-adds{unknown}")
        stays = self.weights.multiplying if self.weights else {}
        float_ = f"; float: {kinds(stays)}" if stays else ""
        return f"int8: {', '.join(said)}{float_}" if said else ""


_TRAINING = "what dropout and batch statistics do is in these numbers; eval() is for inference"
_SAID = 'Dynamo does not capture all of the code; TORCH_LOGS="graph_breaks" shows where. It says:'


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


def _weights(rows: Sequence[Row], beside: WeightBytes | None) -> str:
    """A line on what the weights of all matmuls take, each counted as often as it is read, and
    those beside them once."""
    known = [(row.weight_bytes, row.bits) for row in rows if row.weight_bytes and row.bits]
    others = sum(beside.multiplying.values()) if beside else 0
    if not known and not others:
        return ""
    size = sum(stored for stored, _ in known) + others
    elements = sum(8 * stored / bits for stored, bits in known)
    elements += others / beside.item if beside else 0
    return f"weights: {size / 1e6:.3g} MB read a call, {8 * size / elements:.2f} bits an element"


def _us(row: Row, seconds: float | None) -> str:
    return "" if seconds is None else f"{'' if row.measured else '~'}{seconds * 1e6:.0f}"


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Configurable = None,
    **keyword_inputs: Any,
) -> Report:
    """Runs `model(*inputs, **keyword_inputs)` once in float and reports on each of its matmuls.

    The model runs in the mode that it is in, as compiled code would; the report says so where that
    is training mode. Afterwards its parameters, buffers and attributes and the default random
    generators of torch, Python and numpy are as before, also where it raises. Of a function that is
    no module, only tensors that graphs write. Not put back are inputs, objects that attributes hold
    (other than lists, dicts and sets), generators of the user's own, and what code that Dynamo does
    not capture writes into parameters: a warning, unless it does so through `.data`.

    `model`: a module or function for `torch.compile`, or an `fx.GraphModule`, which is taken as it
    is. `options`: as for the backend. Every site the plan quantizes is also run in int8 on its real
    input, for its SQNR and the time of both forms. Raises ValueError for a wrong option.
    """
    config, _ = parse_options(options)
    session, before = _Session(config, current_costs(), [], set(), set()), said()
    with unchanged(model, "explain"):
        watch(model, session.look, *inputs, dynamic=False, **keyword_inputs)
    if isinstance(model, nn.Module):
        _check(config, model, session.seen)
    rows = [row for graph in session.graphs for row in graph.rows()]
    if isinstance(model, nn.Module) and not isinstance(model, fx.GraphModule):
        rows += _unseen(model, session.seen)
    breaks = said_since(before)
    if not session.graphs:
        warnings.warn(f"qfx.explain saw no graph: {_why_none(breaks)}", stacklevel=2)
    elif not any(row.reason.endswith(_UNSEEN) for row in rows):
        breaks = tuple(line for line in breaks if not line.startswith(BEFORE))
    counts = [graph.multiplied() for graph in session.graphs]
    int8, every, unknown = (sum(count[i] for count in counts) for i in range(3))
    whole = uncompiled_module(model) if isinstance(model, nn.Module) else None
    return Report(
        tuple(rows),
        len(session.graphs),
        in_training(model),
        breaks,
        (int8, every, unknown),
        weight_bytes(whole, session.int8) if whole is not None else None,
        weight_bytes(whole, session.seen) if whole is not None else None,
    )


def _why_none(breaks: Sequence[str]) -> str:
    if breaks:
        return f"Dynamo gives up all of this callable. It says: {' '.join(breaks)}"
    return (
        "torch.compile does not capture this callable, or has reached its recompile limit for it "
        "(torch._dynamo.reset() clears that)"
    )


def _unseen(model: nn.Module, seen: set[str]) -> Iterator[Row]:
    """The modules that multiply and stand in no graph: nothing stays float without a line."""
    plain = uncompiled_module(model)
    everywhere = plain.named_modules(remove_duplicate=False)
    ran = {id(module) for name, module in everywhere if seen & {name, f"{name}.weight"}}
    for name, module in plain.named_modules():
        if name and id(module) not in ran:
            if isinstance(module, _OWN):
                scheme = str(getattr(module, "scheme", BINARY))
                yield Row(name, "", _shape(module), scheme, "", f"an int8 module, {_UNSEEN}")
            elif isinstance(module, _MULTIPLIES):
                yield Row(name, "", _shape(module), "float", "", _UNSEEN)


def _shape(module: nn.Module) -> str:
    if isinstance(module, _RECURRENT):
        return ""  # several matmuls
    return f"?x{module.in_features}x{module.out_features}"


_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_MULTIPLIES = (nn.Linear, *_RECURRENT)
_OWN = (Linear, LSQLinear, BinaryLinear, SignLinear)
_UNSEEN = "in no captured graph: not called on these inputs, or by code Dynamo does not capture"


class _Session(NamedTuple):
    """One call of `explain`: what to decide by, and what was seen."""

    config: Config
    costs: Costs
    graphs: list[SideBySide]
    seen: set[str]  # names of modules and parameters
    int8: set[str]  # of parameters

    def look(self, gm: fx.GraphModule, here: Mapping[str, str], arguments: Sequence[Any]) -> Any:
        context = Context(self.config, self.costs, here, around=None)
        work = run_passes(gm, context, "decide")
        matches, observer = work.matches, SideBySide(gm, work.plan)
        self.graphs.append(observer)
        int8 = [root for e in work.plan.entries if e.scheme for root in e.match.weights]
        self.int8.update(parameter_name(w, here) for w in int8)
        weights = [root for m in matches for root in m.weights]
        self.seen.update(parameter_name(w, here) for w in weights)
        self.seen.update(name for m in matches for name in (m.path, m.name))
        return observer.run(*arguments)


def _check(config: Config, model: nn.Module, seen: set[str]) -> None:
    check_names(config, names_in(uncompiled_module(model)) | seen)
