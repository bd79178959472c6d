"""docs/architectures.md: the tables of the measurements by `benchmarks/architectures.py`."""

from __future__ import annotations

from benchmarks.measures import COSINE_BAR, SQNR_BAR, Row
from benchmarks.zoo_kinds import FIRST, SECOND

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
_FORMULAS = (
    "the lengths in its attention are expressions of the input's size, and no axis of an operand "
    "is the variable itself; only with such an axis is nn.MultiheadAttention expanded"
)
DYNAMIC_NOTES = {"siglip-vision": _FORMULAS, "wavlm": _FORMULAS}

HEAD = """\
# Architectures
This page shows, for {count} architectures of `transformers` {transformers}, how many matmuls become
int8, what stays float and why, and the accuracy. Look up your architecture here before you try it.

The models have small configurations, random weights and no dropout. They ran on one thread with
torch {torch}, `minimum_gain` 0, inner compiler {inner}, commit {commit}.
`python -m benchmarks.architectures --save` measures them and writes
`benchmarks/results/architectures.json`. `--page` then writes this page.

- **int8**: the number of matmuls in int8, of all matmuls that `qfx.explain` lists.
- **SQNR**: SQNR of the main output against float32 eager. The target is {sqnr:.0f} dB.
- **noise**: SQNR of the float model with white noise on the outputs of its linears and
  convolutions. The noise is as strong as the int8 error of each of them. This number shows how
  much the model amplifies errors of any origin.
- **cosine**: cosine between all parameter gradients of one training step and those of float32
  eager. The target is {cosine}.

{summary}

"""


def page(static: Row, dynamic: Row) -> str:
    """Returns the text of docs/architectures.md for the results saved with known and with symbolic
    sizes."""
    host, rows = static["machine"], static["rows"]
    head = HEAD.format(
        count=len(rows),
        sqnr=SQNR_BAR,
        cosine=COSINE_BAR,
        summary=summary(rows),
        torch=host["torch"],
        transformers=host["transformers"],
        inner=" and ".join(sorted({r["inner"] for r in rows})),
        commit=" and ".join(sorted({r["commit"][:12] for r in rows})),
    )
    text = f"{head}{table([printed(row) for row in rows])}\n{exceptions(rows)}"
    return text + dynamic_section(dynamic["rows"])


def table(rows: list[dict[str, str]]) -> str:
    """Returns Markdown without padding, so that one long cell does not widen every line."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(rows: list[Row]) -> str:
    listed = sum("skipped" in r and not r["skipped"] for r in rows)
    exact = sum(meets(r, "sqnr_db", SQNR_BAR) for r in rows)
    trained = sum(meets(r, "gradient_cosine", COSINE_BAR) for r in rows)
    return (
        f"In {listed} of {len(rows)} models every linear that ran is listed. {exact} models meet\n"
        f"the target of SQNR, {trained} that of the gradients. The others are explained below."
    )


def meets(row: Row, key: str, bar: float) -> bool:
    return row.get(key) is not None and row[key] >= bar


def missed(row: Row) -> list[str]:
    """Returns the bars that a row misses, in words."""
    words = [f"failed: {row['failure']}"] if row["failure"] else []
    words += [f"not listed: {', '.join(row['skipped'])}"] if row.get("skipped") else []
    if "sqnr_db" in row and not meets(row, "sqnr_db", SQNR_BAR):
        words.append(f"SQNR {row['sqnr_db']} dB, of the median token {row['median_token_db']} dB")
    if "int8_in_training" in row and not meets(row, "gradient_cosine", COSINE_BAR):
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


def exceptions(rows: list[Row]) -> str:
    lines = [
        f"- **{r['architecture']}**: {'; '.join(missed(r))}. Cause: {NOTES[r['architecture']]}."
        for r in rows
        if missed(r)
    ]
    return "\n## Below a target\n" + "\n".join(lines) + "\n" if lines else ""


# --- symbolic sizes ---

DYNAMIC = """
## Symbolic sizes
{count} models of this kind were compiled with `dynamic=True` and called with inputs of two sizes.
The first call has batch size {first.batch}, {first.tokens} tokens and, for vision models, images
of side {first.side}. The second call has {second.batch}, {second.tokens} and {second.side}. Inner
compiler {inner}, commit {commit}. `python -m benchmarks.architectures --dynamic --save` measures
this.

- **graphs**: the number of graphs compiled for both calls. A number in brackets is that of PyTorch
  alone, if it differs.
- **int8**: the number of matmuls in int8 in each call, of all that `qfx.explain` lists for the
  sizes of the call.
- **SQNR**: SQNR of the main output of each call against float32 eager.
- **lost**: matmuls that stay float although they are int8 with known sizes.

{summary}

"""


def dynamic_section(rows: list[Row]) -> str:
    if not rows:
        return ""
    whole, warned = sum(not lost(r) for r in rows), sum(bool(r.get("warnings")) for r in rows)
    said = (
        f"In {whole} of {len(rows)} models as many matmuls are int8 as with known sizes. "
        f"qfx warned in {warned}."
    )
    head = DYNAMIC.format(
        count=len(rows),
        first=FIRST,
        second=SECOND,
        inner=" and ".join(sorted({r["inner"] for r in rows})),
        commit=" and ".join(sorted({r["commit"][:12] for r in rows})),
        summary=said,
    )
    missing = [
        f"- **{r['architecture']}**: {DYNAMIC_NOTES[r['architecture']]}." for r in rows if lost(r)
    ]
    below = "\n" + "\n".join(missing) + "\n" if missing else ""
    return f"{head}{table([printed_dynamic(row) for row in rows])}\n{below}"


def lost(row: Row) -> list[str]:
    """Returns, in words, what is less than with known sizes."""
    if row["failure"]:
        return [f"failed: {row['failure']}"]
    pairs = zip(row["int8"], row["static_int8"], strict=True)
    words = [f"{s - d} matmuls" for d, s in pairs if d < s]
    return words + [f"{count}: {reason}" for reason, count in row["lost"].items()]


def printed_dynamic(row: Row) -> dict[str, str]:
    done = not row["failure"]
    graphs, plain = row.get("graphs"), row.get("plain_graphs")
    counts = zip(row.get("int8", ()), row.get("matmuls", ()), strict=True)
    return {
        "architecture": row["architecture"],
        "graphs": "" if not done else f"{graphs}" if graphs == plain else f"{graphs} ({plain})",
        "int8": ", ".join(f"{int8}/{total}" for int8, total in counts),
        "SQNR dB": ", ".join(_number(decibel, 1) for decibel in row.get("sqnr_db", ())),
        "warnings": "; ".join(row.get("warnings", ())),
        "lost": "; ".join(lost(row)),
    }
