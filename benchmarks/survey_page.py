"""docs/architectures.md: the saved rows of `benchmarks/architectures.py` as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from benchmarks.common import RESULTS, ROOT, stored
from benchmarks.question import Row
from benchmarks.results_age import TODAY, Age
from benchmarks.zoo import TABLE

QUESTION = "architectures"
PAGE = ROOT / "docs" / "architectures.md"
TEMPLATE = ROOT / "docs" / "architectures.template.md"
SQNR_BAR, COSINE_BAR = 25.0, 0.99

# Why a row misses a bar: the page needs one for each such row.
ROUTING = (
    "random routers give experts nearly equal scores, so errors send some tokens to another expert"
)
NOTES = {
    **dict.fromkeys(("mixtral", "olmoe", "gpt-oss"), ROUTING),
    "deepseek-v3": (
        "errors before its router send 2 of the 32 tokens to another group, with both of their "
        "experts; with the routing of float the cosine is 0.9992"
    ),
    "qwen3-next": (
        "its linear attention amplifies errors, of which float with white noise has 14 dB, and "
        "random routers send tokens to other experts"
    ),
}


def read(folder: Path = RESULTS) -> list[Row]:
    """Returns the rows, of any processor, in the order of the zoo."""
    files = sorted(folder.glob(f"*-{QUESTION}.json"))
    found = {row["architecture"]: row for f in files for row in stored(f)[1]}
    return [found[name] for name in TABLE if name in found]


def page(rows: list[Row], age: Age = TODAY) -> str:
    """Returns the text of docs/architectures.md."""
    marked = {r["commit"][:12] + age.mark(r["commit"], ("csrc/cpu/", "qfx/")) for r in rows}
    text = rendered(
        TEMPLATE,
        rows=rows,
        table=table([printed(row) for row in rows]),
        commits=" and ".join(sorted(marked)),
        **{key: _listed(rows, key) for key in ("inner", "transformers", "torch")},
        sqnr_bar=f"{SQNR_BAR:.0f}",
        cosine_bar=COSINE_BAR,
        listed=sum("skipped" in r and not r["skipped"] for r in rows),
        exact=sum(_meets(r, "sqnr_db", SQNR_BAR) for r in rows),
        trained=sum(_meets(r, "gradient_cosine", COSINE_BAR) for r in rows),
        missed=missed,
        notes=NOTES,
    )
    return text.rstrip("\n") + "\n"


def rendered(template: Path, **values: Any) -> str:
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template.read_text()).render(values)


def _listed(rows: list[Row], key: str) -> str:
    return " and ".join(sorted({row[key] for row in rows}))


def table(rows: Sequence[dict[str, str]]) -> str:
    """Returns Markdown without padding, so that one long cell does not widen every line."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _meets(row: Row, key: str, bar: float) -> bool:
    return row.get(key) is not None and row[key] >= bar


def missed(row: Row) -> list[str]:
    """Returns the bars that a row misses, in words."""
    words = [f"failed: {row['failure']}"] if row["failure"] else []
    words += [f"not listed: {', '.join(row['skipped'])}"] if row.get("skipped") else []
    if "sqnr_db" in row and not _meets(row, "sqnr_db", SQNR_BAR):
        words.append(f"SQNR {row['sqnr_db']} dB, of the median token {row['median_token_db']} dB")
    if "int8_in_training" in row and not _meets(row, "gradient_cosine", COSINE_BAR):
        float_ = "its training stayed float"
        words.append(f"cosine {row['gradient_cosine']}" if row["int8_in_training"] else float_)
    words += [f"gradient lost: {name}" for name in row.get("lost", [])]
    return words + row.get("warnings", [])


def printed(row: Row) -> dict[str, str]:
    """Returns the cells of a row; what was not measured is empty."""
    reasons = dict(row.get("reasons", {}))
    reasons |= {f"{op} is not listed": count for op, count in row.get("unlisted", {}).items()}
    return {
        "architecture": row["architecture"],
        "kind": row["kind"],
        "int8": f"{row['int8']}/{row['matmuls']}" if "int8" in row else "",
        "SQNR dB": _number(row.get("sqnr_db"), 1),
        "noise dB": _number(row.get("noise_db"), 1),
        "cosine": _number(row.get("gradient_cosine"), 4),
        "what stayed float": "; ".join(f"{count}: {reason}" for reason, count in reasons.items()),
    }


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
