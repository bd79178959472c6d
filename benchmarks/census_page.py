"""docs/census.md: the saved rows of `benchmarks/census.py` as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.census import GAINS, share
from benchmarks.census_models import FIELDS
from benchmarks.common import RESULTS, ROOT, stored
from benchmarks.macs import ACTIVATIONS, by_weight
from benchmarks.question import Row
from benchmarks.results_age import TODAY, Age
from benchmarks.survey_page import rendered, table

QUESTION = "census"
PAGE = ROOT / "docs" / "census.md"
TEMPLATE = ROOT / "docs" / "census.template.md"
FIELD_BAR = 0.8
SMALLEST = 0.0005  # parts that are printed as 0.0 % are left out

# Why a field is below the bar: the page needs a sentence for each such field, and for no other.
NOTES: dict[str, str] = {}


def read(folder: Path = RESULTS) -> list[Row]:
    """Returns the rows, of any processor, in the order of the census."""
    files = sorted(folder.glob(f"*-{QUESTION}.json"))
    found = {(row["field"], row["model"]): row for f in files for row in stored(f)[1]}
    names = [(field, name) for field, models in FIELDS.items() for name in models]
    return [found[name] for name in names if name in found]


def page(rows: Sequence[Row], age: Age = TODAY) -> str:
    """Returns the text of docs/census.md."""
    sources = ("qfx/", "csrc/cpu/", "benchmarks/macs.py", "benchmarks/fields/")
    commits = sorted({r["commit"][:12] + age.mark(r["commit"], sources) for r in rows})
    fields = {name: [r for r in rows if r["field"] == name] for name in FIELDS}
    fields = {name: own for name, own in fields.items() if own}
    text = rendered(
        TEMPLATE,
        rows=rows,
        fields={
            name: {"table": table([_model(row) for row in own]), "note": NOTES.get(name, "")}
            for name, own in fields.items()
        },
        table=table([*(_field(name, own) for name, own in fields.items()), _mean(fields)]),
        low=below_bar(rows),
        bar=f"{FIELD_BAR:.0%}".replace("%", " %"),
        commits=" and ".join(commits),
        torch=" and ".join(sorted({row["torch"] for row in rows})),
    )
    return text.rstrip("\n") + "\n"


def below_bar(rows: Sequence[Row]) -> list[str]:
    """Returns the fields whose mean share at gain 0 is below the bar."""
    return [
        name
        for name in FIELDS
        if (own := [r for r in rows if r["field"] == name]) and _share(own, "gain 0") < FIELD_BAR
    ]


def _share(rows: Sequence[Row], gain: str) -> float:
    return mean(share(row, gain) for row in rows)


def _field(name: str, rows: Sequence[Row]) -> dict[str, str]:
    shares = {gain: _share(rows, gain) for gain in GAINS}
    return _cells(name, len(rows), shares, _float_parts(rows))


def _mean(fields: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    shares = {gain: mean(_share(rows, gain) for rows in fields.values()) for gain in GAINS}
    parts: Counter[str] = Counter()
    for rows in fields.values():
        for kind, part in _float_parts(rows).items():
            parts[kind] += part / len(fields)  # type: ignore[assignment]
    return _cells("mean of the fields", sum(map(len, fields.values())), shares, parts)


def _cells(
    name: str, count: int, shares: Mapping[str, float], parts: Mapping[str, float]
) -> dict[str, str]:
    return {
        "field": name,
        "models": str(count),
        "`minimum_gain=0`": _percent(shares["gain 0"]),
        "default": _percent(shares["default"]),
        "float at `minimum_gain=0`, points": _listed(parts),
    }


def _float_parts(rows: Sequence[Row]) -> dict[str, float]:
    """Returns, for each kind, the mean of the part of a model's products with a weight that is of
    this kind and stays float at gain 0."""
    parts: Counter[str] = Counter()
    for row in rows:
        whole = by_weight(row["macs"]) * len(rows)
        for kind, count in row["macs"].items():
            if kind != ACTIVATIONS:
                parts[kind] += (count - row["gain 0"].get(kind, 0)) / whole
    return dict(parts)


def _model(row: Row) -> dict[str, str]:
    beside = {key: row[key].get(ACTIVATIONS, 0) / 1e6 for key in ("macs", *GAINS)}
    activations = f"{beside['gain 0']:,.1f} of {beside['macs']:,.1f}" if beside["macs"] else ""
    return {
        "model": row["model"],
        "million": f"{by_weight(row['macs']) / 1e6:,.1f}",
        "`minimum_gain=0`": _percent(share(row, "gain 0")),
        "default": _percent(share(row, "default")),
        "float at `minimum_gain=0`, points": _listed(_float_parts([row])),
        "reasons": "; ".join(_reasons(row)),
        "two activations, million": activations,
    }


def _reasons(row: Row) -> list[str]:
    """Returns the reasons of at least one hundredth of the products with a weight, without the
    sizes of single convolutions."""
    counts: Counter[str] = Counter()
    for reason, count in row["reasons"].items():
        counts[re.sub(r" of \[.*?\]| \(\d.*?\)", "", reason)] += count
    least = by_weight(row["macs"]) / 100
    return [reason for reason, count in counts.most_common() if count >= least]


def _listed(parts: Mapping[str, float]) -> str:
    ordered = sorted(parts.items(), key=lambda pair: -pair[1])
    return "; ".join(f"{kind} {part * 100:.1f}" for kind, part in ordered if part >= SMALLEST)


def _percent(part: float) -> str:
    return f"{part * 100:.1f} %"
