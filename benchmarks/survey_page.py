"""docs/architectures.md: the saved rows of `benchmarks/architectures.py` as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from benchmarks.common import RESULTS, ROOT, stored
from benchmarks.results_age import Age, NoAge
from benchmarks.zoo import FIRST, SECOND, TABLE

Row = dict[str, Any]
QUESTION = "architectures"
PAGE = ROOT / "docs" / "architectures.md"
TEMPLATE = ROOT / "docs" / "architectures.template.md"
SQNR_BAR, COSINE_BAR = 25.0, 0.99

# Why a row misses a bar: the page needs one for each such row.
ROUTING = (
    "random routers give experts nearly equal scores, so errors send some tokens to another expert"
)
NOTES = {
    **dict.fromkeys(("mixtral", "qwen2-moe", "olmoe", "gpt-oss"), ROUTING),
    "clip": "its four outputs are cosines near 0, small differences of large numbers",
    "qwen3-next": "its linear attention amplifies errors; float with white noise is as inaccurate",
}
# Why symbolic sizes lose something, for each row that does.
FORMULAS = (
    "the lengths in its attention are expressions of the input's size, and no axis of an operand "
    "is the variable itself; only with such an axis is nn.MultiheadAttention expanded"
)
DYNAMIC_NOTES = {"siglip-vision": FORMULAS, "wavlm": FORMULAS}


def read(folder: Path = RESULTS) -> dict[str, list[Row]]:
    """Returns the rows with `static` and with `dynamic` sizes, of any processor, in the order of
    the zoo."""
    files = sorted(folder.glob(f"*-{QUESTION}.json"))
    found = {(row["sizes"], row["architecture"]): row for f in files for row in stored(f)[1]}
    return {
        sizes: [found[sizes, name] for name in TABLE if (sizes, name) in found]
        for sizes in ("static", "dynamic")
    }


def page(rows: dict[str, list[Row]], age: Age | None = None) -> str:
    """Returns the text of docs/architectures.md, with marks of age if `age` is given."""

    def commits(rows: list[Row]) -> str:
        marked = {r["commit"][:12] + (age or NoAge()).mark(r, ("csrc/cpu/", "qfx/")) for r in rows}
        return " and ".join(sorted(marked))

    static, dynamic = rows["static"], rows["dynamic"]
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    text = environment.from_string(TEMPLATE.read_text()).render(
        **{f"{sizes}_inner": _listed(rows[sizes], "inner") for sizes in rows},
        static_commits=commits(static),
        dynamic_commits=commits(dynamic),
        static=static,
        dynamic=dynamic,
        static_table=table([printed(row) for row in static]),
        dynamic_table=table([printed_dynamic(row) for row in dynamic]),
        transformers=_listed(static, "transformers"),
        torch=_listed(static, "torch"),
        sqnr_bar=f"{SQNR_BAR:.0f}",
        cosine_bar=COSINE_BAR,
        listed=sum("skipped" in r and not r["skipped"] for r in static),
        exact=sum(_meets(r, "sqnr_db", SQNR_BAR) for r in static),
        trained=sum(_meets(r, "gradient_cosine", COSINE_BAR) for r in static),
        whole=sum(not lost(r) for r in dynamic),
        warned=sum(bool(r.get("warnings")) for r in dynamic),
        missed=missed,
        lost=lost,
        notes=NOTES,
        dynamic_notes=DYNAMIC_NOTES,
        first=FIRST,
        second=SECOND,
    )
    return text.rstrip("\n") + "\n"


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


def lost(row: Row) -> list[str]:
    """Returns, in words, what is less than with known sizes."""
    if row["failure"]:
        return [f"failed: {row['failure']}"]
    pairs = zip(row["int8"], row["static_int8"], strict=True)
    words = [f"{s - d} matmuls" for d, s in pairs if d < s]
    return words + [f"{count}: {reason}" for reason, count in row["lost"].items()]


def printed_dynamic(row: Row) -> dict[str, str]:
    graphs, plain = row.get("graphs", ""), row.get("plain_graphs", "")
    counts = zip(row.get("int8", ()), row.get("matmuls", ()), strict=True)
    return {
        "architecture": row["architecture"],
        "graphs": f"{graphs}" if graphs == plain else f"{graphs} ({plain})",
        "int8": ", ".join(f"{int8}/{total}" for int8, total in counts),
        "SQNR dB": ", ".join(_number(decibel, 1) for decibel in row.get("sqnr_db", ())),
        "warnings": "; ".join(row.get("warnings", ())),
        "lost": "; ".join(lost(row)),
    }
