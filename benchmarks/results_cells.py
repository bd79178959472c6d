"""The cells of the tables in docs/results.md for one row of a saved file: columns and their
text."""

from __future__ import annotations

from string import Formatter
from typing import Any

from benchmarks.results_table import Row
from benchmarks.standing import standings

EXACT_DB = 100.0  # above it, a difference is that of two orders of float32 sums
CLOSE = 0.2  # of a prediction, relative


def model(row: Row, rows: list[Row]) -> dict[str, str]:
    """Returns one column for each number of threads."""
    return {threads(row): "not run" if "reason" in row else speed(row, rows)}


def speed(row: Row, rows: list[Row]) -> str:
    """Returns speed and SQNR; for the baseline, milliseconds. A star marks a row whose baseline was
    measured in a run of its own and is not shown."""
    if row["candidate"] == "float32 eager":
        return f"{row['median_ms']:.{0 if row['median_ms'] > 100 else 1}f} ms"
    keys = ("model", "threads", "commit")
    run = [row[key] for key in keys]
    turns = [r for r in rows if r["candidate"] == "float32 eager"]
    star = "" if any([r[key] for key in keys] == run for r in turns) else " *"
    return f"{row['ratio']:.2f}x{_exactness(row)}{star}"


def _exactness(row: Row) -> str:
    if "sqnr_db" not in row and "logits_sqnr_db" in row:
        return f", {row['logits_sqnr_db']:.1f} dB of the logits"
    decibel = row.get("sqnr_db", EXACT_DB)
    return f", {decibel:.1f} dB" if decibel < EXACT_DB else ""


def threads(row: Row) -> str:
    return f"{row['threads']} thread{'' if row['threads'] == 1 else 's'}"


def places(rows: list[Row]) -> list[str]:
    """Returns, for one model, the rank of qfx for each number of threads, then what did not run and
    why."""
    lines = []
    for count in dict.fromkeys(threads(row) for row in rows):
        own = [row for row in rows if threads(row) == count]
        lines += [f"{count}: {line}." for line in standings(own)]
        lines += [f"{count}: no {r['candidate']}: {r['reason']}" for r in own if "reason" in r]
    return lines


def own_first(row: Row) -> Any:
    name = row["candidate"]
    return (
        name != "float32 eager",
        not name.startswith("float32"),
        not name.startswith("qfx"),
        name,
        row["model"],
    )


def linear(row: Row, rows: list[Row]) -> dict[str, str]:
    time = f"{row['median_us']:.0f} us" if row["median_us"] >= 100 else f"{row['median_us']:.1f} us"
    if row["isa"] == "float32":
        return {"float32": time}
    peak = row.get("percent_of_peak")
    return {row["isa"]: f"{time}, {row['speedup']:.1f}x" + (f", {peak} %" if peak else "")}


def shape(row: Row) -> str:
    return str(row["shape"]).replace("x", " x ")


def attention(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "float32": f"{row['float us']:.0f} us",
        row["isa"]: f"{row['us']:.0f} us, {row['of float']:.2f}x",
    }


def product(row: Row, rows: list[Row]) -> dict[str, str]:
    speed = "" if row["form"] == "float32" else f", {row['speedup']:.2f}x"
    return {row["form"]: f"{row['median_us']:.0f} us{speed}"}


def memory(row: Row, rows: list[Row]) -> dict[str, str]:
    found = {"us": f"{row['median_us']:.0f}", "GB/s": f"{row['gb_per_s']:.1f}"}
    if row["gmacs"] is not None:
        found |= {"GMAC/s": f"{row['gmacs']:.1f}", "of float32": f"{row['speedup']:.2f}x"}
    return found


def bandwidth(row: Row, rows: list[Row]) -> dict[str, str]:
    way = "as set" if row["way"] == "set" else row["way"]
    return {way: f"{100 * row['share']:.0f} %"}


def cost(row: Row, rows: list[Row]) -> dict[str, str]:
    """Returns, over all rows of the instruction set, how many are predicted within CLOSE."""
    own = [r for r in rows if r["isa"] == row["isa"]]
    errors = {"float": "float_error", "int8": "int8_error", "the gain": "ratio_error"}
    within = {n: sum(abs(r[key]) <= CLOSE for r in own) / len(own) for n, key in errors.items()}
    return {"shapes": str(len(own)), **{n: f"{100 * w:.0f} %" for n, w in within.items()}}


def language(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        **_divergence(row),
        "perplexity": f"{row['perplexity']:.2f}",
        "capitals of the world": f"{row['capitals world %']:.1f} %",
        "common capitals": f"{row['capitals common-countries %']:.1f} %",
        **_how(row),
    }


def speech(row: Row, rows: list[Row]) -> dict[str, str]:
    return {**_divergence(row), "same text": f"{row['same transcripts %']:.0f} %", **_how(row)}


def _divergence(row: Row) -> dict[str, str]:
    return {"KL": f"{row['KL']:.4f}", "top-1": f"{row['top-1 %']:.1f} %"}


def _how(row: Row) -> dict[str, str]:
    """Returns the seconds of a calibration, and the schemes of the matmuls."""
    seconds = row.get("calibration s")
    schemes = row.get("schemes", "")
    return {"calibration": f"{seconds:.0f} s" if seconds else "", "schemes": schemes}


def _decibel(row: Row) -> str:
    return f"{row['SQNR dB']:.1f}" if row["SQNR dB"] < EXACT_DB else ""


def encoder(row: Row, rows: list[Row]) -> dict[str, str]:
    distance = row.get("1 - cosine")
    return {
        "1 - cosine, in 0.001": "" if distance is None else f"{1000 * abs(distance):.3f}",
        "texts, Pearson": f"{row['texts Pearson']:.4f}",
        "SimLex-999, Spearman": f"{row['simlex999 Spearman']:.4f}",
        "WordSim-353, Spearman": f"{row['wordsim353 Spearman']:.4f}",
        "SQNR dB": _decibel(row),
        **_how(row),
    }


def vision(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "accuracy": f"{row['accuracy %']:.2f} %",
        "negative log likelihood": f"{row['nll']:.4f}",
        "SQNR dB": _decibel(row),
        **_how(row),
    }


def learnt(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "accuracy": f"{row['accuracy %']:.2f} %",
        "negative log likelihood": f"{row['nll']:.3f}",
    }


def training(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "s a step": f"{row['step_s']:.2f}",
        "speed": f"{row['speed']:.2f}x",
        "memory": f"{row['step_mb']:.0f} MB",
        "loss": f"{row['loss']:.3f}",
    }


def lora(row: Row, rows: list[Row]) -> dict[str, str]:
    if "reason" in row:
        return {"s a step": "not run"}
    return {
        "s a step": f"{row['step_s']:.2f}",
        "base": f"{row['base_mb']:.0f} MB",
        "steps": f"{row['step_mb']:.0f} MB",
        "loss": f"{row['loss_first']:.2f} to {row['loss_last']:.2f}",
    }


def not_run(rows: list[Row], key: str = "base") -> list[str]:
    return [f"no {row[key]}: {row['reason']}" for row in rows if "reason" in row]


# Of a task: what its figures say where it has them.
FIGURES: dict[str, tuple[str, ...]] = {
    "quantize": ("{sqnr_db:.1f} dB", "{agreement:.1%}"),
    "save": ("{file_mb:.0f} MB",),
    "load": ("{peak_of_file:.2f} of the file",),
    "generate": ("{tokens_per_s:.1f} tokens/s", "{as_float} of {of}"),
    "fine-tune": ("{step_s:.1f} s a step", "loss {loss_first:.2f} to {loss_last:.2f}", "{cosine}"),
    "merge": ("{kept:.0%}",),
}


def citizen(row: Row, rows: list[Row]) -> dict[str, str]:
    """Returns a column for each task: lines, the outcome unless the task worked, and figures."""
    came = row.get("outcome", "not run")
    figures = [text.format(**row) for text in FIGURES[row["task"]] if _has(row, text)]
    parts = [f"{row['lines']} line{'' if row['lines'] == 1 else 's'}", *figures]
    return {row["task"]: ", ".join(parts if came == "works" else [parts[0], came, *figures])}


def _has(row: Row, text: str) -> bool:
    return all(name in row for _, name, _, _ in Formatter().parse(text) if name)


def went_wrong(rows: list[Row]) -> list[str]:
    """Returns the messages of errors, and how a wrong result was detected."""
    said = [(row, row.get("said") or row.get("reason")) for row in rows]
    lines = [f"{row['library']}, {row['task']}: {text}" for row, text in said if text]
    return [line if line.endswith(".") else f"{line}." for line in lines]


def prepare(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "CPU s": f"{row['cpu_s']:.1f}",
        "s on the wall": f"{row['wall_s']:.1f}",
        "of float32": f"{row['ratio']:.2f}",
    }


def symmetry(row: Row, rows: list[Row]) -> dict[str, str]:
    kinds = ("symmetric", "asymmetric")
    return {k: f"{row[f'{k}_db']:.1f} dB, {row[f'{k}_us']:.0f} us" for k in kinds}


def groups(row: Row, rows: list[Row]) -> dict[str, str]:
    kinds = ("both 32", "both 64", "both 128", "weights 64", "weights 64, zero points")
    return {"one scale a row": f"{row['int8_linear_us']:.0f} us"} | {
        kind: f"{row[kind]:.2f}" for kind in kinds
    }


def packed(row: Row, rows: list[Row]) -> dict[str, str]:
    kinds = ("4 bits, 32", "4 bits, 64", "4 bits, 64, no zero points", "4 bits, 128", "5 bits, 64")
    return {"int8": f"{row['int8_us']:.0f} us"} | {kind: f"{row[kind]:.2f}" for kind in kinds}


def rotation(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "plain": f"{row['plain_us']:.0f} us",
        "rotated": f"{row['rotated']:.3f}",
        "rotated, with a factor": f"{row['scaled']:.3f}",
    }


def binary(row: Row, rows: list[Row]) -> dict[str, str]:
    time = f"{row['median_us']:.0f} us"
    return {row["isa"]: time if row["isa"] == "float32" else f"{time}, {row['speedup']:.1f}x"}


def wrapper(row: Row, rows: list[Row]) -> dict[str, str]:
    return {"us a call": f"{row['median_us']:.2f}"}


def parts(row: Row, rows: list[Row]) -> dict[str, str]:
    return {f"{row['mode']}, {row['layers']} layers": f"{row['median_us']:.1f} us"}
