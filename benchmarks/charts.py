"""Charts of the saved results: SVG files in docs/charts, for the README and the pages.

`python -m benchmarks.charts` draws them anew. It needs matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.common import ROOT
from benchmarks.question import Row
from benchmarks.results_page import Saved, read

FOLDER = ROOT / "docs" / "charts"
OURS, OTHERS, INK = "#0072b2", "#b6bec8", "#24292f"
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "qfx",  # the same chart is the same file
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


class Chart(NamedTuple):
    """A chart with one panel for each processor and one bar for each way. `question`: the name of
    the saved files. `only`: fields that a row must have. `way`: the field that names a bar. `bar`:
    the length of a bar. `form`: the text at its end. `ways`: those to show, None for all."""

    title: str
    question: str
    only: dict[str, Any]
    way: str
    bar: Callable[[Row], float | None]
    form: str
    ways: Sequence[str] | None = None


NEWCOMERS = (
    "float32 eager", "float32 Inductor", "bfloat16 Inductor", "qfx", "qfx exported",
    "torchao W8A8", "CTranslate2 int8", "ONNX Runtime int8", "OpenVINO int8",
)  # fmt: skip
DECODERS = (
    "float32 eager", "float32 Inductor", "qfx generate w8a8", "qfx generate w4a8",
    "llama.cpp Q8_0", "llama.cpp Q4_0", "OpenVINO GenAI int8",
)  # fmt: skip


def _speed(model: str, of: str) -> Chart:
    only = {"model": model, "threads": 1}
    title = f"{of}, one thread: times as fast as float32"
    return Chart(title, "models", only, "candidate", lambda r: r.get("ratio"), "{:.2f}x", NEWCOMERS)


CHARTS = {
    "bert": _speed("bert-1x128", "BERT-base, 128 tokens"),
    "minilm": _speed("minilm-32x128", "MiniLM, 32 x 128 tokens"),
    "vit": _speed("vit-1x224", "ViT-B, one image"),
    "decoding": Chart(
        "SmolLM2-135M after 128 tokens, one thread: tokens a second",
        "decode",
        {"model": "smollm2", "batch": 1, "context": 128, "threads": 1},
        "way",
        lambda row: row.get("step_tokens_s"),
        "{:.1f}",
        DECODERS,
    ),
}  # fmt: skip


def bars(chart: Chart, files: Sequence[Saved]) -> dict[str, dict[str, float]]:
    """Returns processor -> way -> length. Processors on which qfx was not compared with another
    library are left out."""
    found: dict[str, dict[str, float]] = {}
    for file in files:
        rows = [r for r in file.rows if all(r.get(k) == v for k, v in chart.only.items())]
        if file.name != chart.question or not rows:
            continue
        lengths = {str(row[chart.way]): chart.bar(row) for row in rows}
        kept = {w: x for w, x in lengths.items() if x and (not chart.ways or w in chart.ways)}
        if any(w.startswith("qfx") for w in kept) and any(map(_of_others, kept)):
            found[file.processor] = dict(sorted(kept.items(), key=lambda each: each[1]))
    return found


def _of_others(way: str) -> bool:
    return not way.startswith(("qfx", "float32"))


def svg(chart: Chart, files: Sequence[Saved]) -> str:
    """Returns the drawing. Raises ValueError if there is nothing to draw."""
    panels = bars(chart, files)
    if not panels:
        raise ValueError(f"no saved results of {chart.question} with {chart.only}")
    longest = max(map(len, panels.values()))
    with matplotlib.rc_context(STYLE):
        size = (4.6 * len(panels), 0.9 + 0.26 * longest)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (processor, lengths) in zip(axes, panels.items(), strict=True):
            _panel(axis, processor, lengths, chart.form)
        figure.suptitle(chart.title, fontsize=10, fontweight="bold")
        with io.StringIO() as text:
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _panel(axis: Any, processor: str, lengths: dict[str, float], form: str) -> None:
    colors = [OURS if way.startswith("qfx") else OTHERS for way in lengths]
    drawn = axis.barh(list(lengths), list(lengths.values()), height=0.7, color=colors)
    axis.bar_label(drawn, [form.format(x) for x in lengths.values()], padding=3)
    axis.set_title(processor, fontsize=9, loc="left")
    axis.set_xlim(0, 1.18 * max(lengths.values()))
    axis.xaxis.set_visible(False)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(length=0)


def write(folder: Path = FOLDER) -> None:
    files = read()
    for name, chart in CHARTS.items():
        (folder / f"{name}.svg").write_text(svg(chart, files))


if __name__ == "__main__":
    write()
