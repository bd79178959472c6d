"""The cells of docs/results.md: templates of text, filled with the figures of saved rows.

A template is a text such as "{step_s:.2f} s", or a list of texts that are joined by commas. A text
with a figure that the row lacks is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any

from benchmarks.question import Row
from benchmarks.settings import SETTINGS

Template = str | Sequence[str]
EXACT_DB = 100.0  # above it, a difference is that of two orders of float32 sums
CLOSE = 0.2  # of a prediction, relative
BASELINE = "float32 eager"
# Candidate -> how it is called here.
OWN = {"qfx": "qfx compiled", "qfx program": "qfx as a program", "qfx exported": "qfx exported"}


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def decibels(db: float) -> str:
    """Raises KeyError for a result that is exact: there is no figure to show."""
    if db >= EXACT_DB:
        raise KeyError(db)
    return f"{db:.1f}"


FORMATS: dict[str, Callable[[Any], str]] = {  # of figures, beside those of Python
    "threads": lambda n: count(n, "thread"),
    "lines": lambda n: count(n, "line"),
    "us": lambda us: f"{us:.{0 if us >= 100 else 1}f} us",
    "ms": lambda ms: f"{ms:.{0 if ms > 100 else 1}f} ms",
    "db": decibels,
    "thousandths": lambda x: f"{1000 * abs(x):.3f}",
    "shape": lambda shape: str(shape).replace("x", " x "),
}


class Cell(Formatter):
    """Formats a text by a row. Raises KeyError for a figure that the row lacks."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        if kwargs[key] is None:
            raise KeyError(key)
        return kwargs[key]

    def format_field(self, value: Any, spec: str) -> str:
        return FORMATS[spec](value) if spec in FORMATS else format(value, spec)


def filled(template: Template, row: Row) -> str | None:
    """Returns the text of a cell, or None if the row has no figure for it."""
    texts = [template] if isinstance(template, str) else template
    found = [text for text in map(lambda t: _one(t, row), texts) if text]
    return ", ".join(found) or None


def _one(text: str, row: Row) -> str:
    try:
        return Cell().vformat(text, (), row)
    except KeyError:
        return ""


# --- figures that are computed from a row and the others of its file ---


def of_models(row: Row, rows: list[Row]) -> Row:
    """Adds a star if the baseline of the row's run is not shown."""
    if row["candidate"] == BASELINE:
        return {"text": filled("{median_ms:ms}", row)}
    if "reason" in row:
        return {"text": "not run"}
    keys = ("model", "threads", "commit")
    turns = [[r[key] for key in keys] for r in rows if r["candidate"] == BASELINE]
    exact = "{sqnr_db:db} dB" if "sqnr_db" in row else "{logits_sqnr_db:db} dB of the logits"
    star = "" if [row[key] for key in keys] in turns else " *"
    return {"text": f"{filled(['{ratio:.2f}x', exact], row)}{star}"}


def of_cost(row: Row, rows: list[Row]) -> Row:
    """Adds, over all rows of the instruction set, how many are predicted within CLOSE."""
    own = [r for r in rows if r["isa"] == row["isa"]]
    kinds = ("float_error", "int8_error", "ratio_error")
    shares = {k: sum(abs(r[k]) <= CLOSE for r in own) / len(own) for k in kinds}
    return {"shapes": len(own), **{f"{k} close": share for k, share in shares.items()}}


COMPUTED: dict[str, Callable[[Row, list[Row]], Row]] = {
    **dict.fromkeys(("models", "networks"), of_models),
    "cost": of_cost,
}


# --- the order of rows, and the lines below a table ---


def float_first(row: Row) -> Any:
    name = row["candidate"]
    return (name != BASELINE, not name.startswith("float32"), not name.startswith("qfx"), name)


def as_settings(row: Row) -> Any:
    """Returns a sort key: float first, then the settings in the order of benchmarks/settings.py,
    then others."""
    known = ["float", *SETTINGS]
    return known.index(row["setting"]) if row["setting"] in known else len(known)


ORDERS = {"models": float_first, "networks": float_first, "accuracy": as_settings}


# --- the rank of qfx ---


def standings(rows: Sequence[Row]) -> list[str]:
    """Returns one line for each of OWN among `rows`, of one model and one number of threads.

    The rank is by the speed relative to float32 eager of the same run. The others are all ways that
    are not qfx; a way that did not run is not counted.
    """
    others = [r for r in rows if "reason" not in r and not r["candidate"].startswith("qfx")]
    found = {row["candidate"]: row for row in rows}
    return [f"{OWN[name]}: {_place(found[name], others)}" for name in OWN if name in found]


def _place(row: Row, others: Sequence[Row]) -> str:
    if "reason" in row:
        return f"did not run. {row['reason']}"
    best = max(others, key=lambda r: r["ratio"], default=row)
    rank = 1 + sum(r["ratio"] > row["ratio"] for r in others)
    text = f"{ordinal(rank)} of {1 + len(others)}"
    if rank == 1:
        return text
    return f"{text}, {best['ratio'] / row['ratio']:.2f}x the first ({best['candidate']})"


def ordinal(rank: int) -> str:
    if rank == 1:
        return "first"
    teens = rank % 100 in (11, 12, 13)
    return f"{rank}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(rank % 10, 'th')}"


def places(rows: list[Row]) -> list[str]:
    """Returns, for one model, the rank of qfx for each number of threads, then what did not run and
    why."""
    lines = []
    for number in dict.fromkeys(row["threads"] for row in rows):
        own = [row for row in rows if row["threads"] == number]
        said = [f"{line}." for line in standings(own)] + not_run(own)
        lines += [f"{count(number, 'thread')}: {line}" for line in said]
    return lines


def not_run(rows: list[Row]) -> list[str]:
    """Returns what did not run, and what went wrong or was detected to be wrong."""
    names = ("candidate", "way", "base", "isa")
    lines = [
        f"no {next(r[n] for n in names if n in r)}: {r['reason']}" for r in rows if "reason" in r
    ]
    return lines + [f"{r['library']}, {r['task']}: {r['said']}" for r in rows if "said" in r]


BELOW = {"models": places, "networks": places}
