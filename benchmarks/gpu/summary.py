"""The short table: what was wrong, the speeds reached, and every ratio with its bar."""

from __future__ import annotations

from tabulate import tabulate

from benchmarks.gpu.session import Row, Session


def table(session: Session) -> str:
    parts = [f"qfx on {session.name}", _checks(session), _ceilings(session), _ratios(session)]
    return "\n\n".join(part for part in parts if part)


def wrong(session: Session) -> int:
    """Returns 1 if a check failed or a stage ended with an error, else 0."""
    return int(any(row.get("ok") is False for row in session.rows))


def _checks(session: Session) -> str:
    rows = [row for row in session.rows if "ok" in row]
    failed = [f"{_name(r)}: {r.get('first') or r.get('result')}" for r in rows if not r["ok"]]
    return "\n".join([f"{len(rows) - len(failed)} checks passed, {len(failed)} failed", *failed])


def _name(row: Row) -> str:
    return " ".join(str(row[key]) for key in ("stage", "operands", "kernel", "what") if key in row)


def _ceilings(session: Session) -> str:
    found = [
        (row["what"], row.get("kernel", ""), row.get("TOPS"), row.get("TB/s"))
        for row in session.of("ceilings")
        if "what" in row and ("TOPS" in row or "TB/s" in row)
    ]
    return tabulate(found, ("reached", "kernel", "TOPS", "TB/s"), floatfmt=".4g") if found else ""


def _ratios(session: Session) -> str:
    rows = [r for stage in ("ratios", "linear", "model") for r in session.of(stage) if "ratio" in r]
    found = [
        (r["what"], r.get("shape", ""), r.get("judged") or r["way"], r["ratio"], r["must"],
         "yes" if r["ratio"] >= r["must"] else "no")
        for r in rows
        if r.get("way") != "bf16"
    ]  # fmt: skip
    head = ("what", "shape", "way", "ratio", "must", "met")
    return tabulate(found, head, floatfmt=".2f") if found else ""
