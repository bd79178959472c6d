"""Draws the saved results of `benchmarks.models`: speed relative to float32 eager, and SQNR.

    python -m benchmarks.plot [benchmarks/results/<cpu>-models.json] [--threads 1]
Writes an SVG with the same name next to each file; by default for all files of `benchmarks.models`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.common import RESULTS

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "qfx"  # the same figure is the same file
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
from matplotlib import pyplot  # noqa: E402  behind the choice of the backend

OWN, OTHER, BAR_INCHES = "#c44e52", "#8c8c8c", 0.22
Row = dict[str, Any]


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Draws one panel for each model, and one bar for each candidate that ran."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    panels = [[r for r in rows if r["model"] == m and "reason" not in r] for m in models]
    heights = [len(panel) + 2 for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(7, 1 + BAR_INCHES * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    for model, panel, axis in zip(models, panels, axes[:, 0], strict=True):
        _bars(axis, panel)
        axis.set_title(model, fontsize=9, loc="left")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _bars(axis: Any, panel: list[Row]) -> None:
    names = [row["candidate"] for row in panel]
    colors = [OWN if name.startswith("qfx") else OTHER for name in names]
    bars = axis.barh(names, [row["ratio"] for row in panel], color=colors)
    axis.bar_label(bars, [_label(row) for row in panel], fontsize=7, padding=2)
    axis.axvline(1.0, color="black", linewidth=0.5)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.tick_params(labelsize=7)


def _label(row: Row) -> str:
    decibel = row.get("sqnr_db", row.get("logits_sqnr_db"))
    return f"{row['ratio']:.2f}x" + (f", {decibel:.0f} dB" if decibel is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for path in options.results or sorted(RESULTS.glob("*-models.json")):
        saved = json.loads(path.read_text())
        rows = [row for row in saved["rows"] if row["threads"] == options.threads]
        title = (
            f"Speed against float32 eager, {saved['machine']['cpu']}, threads: {options.threads}"
        )
        draw(rows, title, path.with_suffix(".svg"))
        print(f"wrote {path.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
