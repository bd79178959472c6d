"""The tables of docs/results.md: which rows of a saved file each shows, and how it prints them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
EXACT_DB = 100.0  # above it, a difference is that of two orders of float32 sums
CLOSE = 0.2  # of a prediction, relative


@dataclass(frozen=True)
class Section:
    """One table. `benchmark`: how its files' names end. `head`: of the first column, filled by
    `row`. `cells`: columns of one processor and their text, of a row among all rows of its file.
    `only`: which rows; `order`: a key to sort them by, as they stand in the file by default."""

    benchmark: str
    title: str
    text: str
    head: str
    row: Callable[[Row], str]
    cells: Callable[[Row, list[Row]], dict[str, str]]
    only: Callable[[Row], bool] = lambda row: True
    order: Callable[[Row], Any] = lambda row: 0


def _model(row: Row, rows: list[Row]) -> dict[str, str]:
    """Speed and SQNR; the baseline in ms; a star where the row has a baseline of its own run."""
    if "reason" in row:
        return {row["model"]: row["reason"]}
    if row["candidate"] == "float32 eager":
        return {row["model"]: f"{row['median_ms']:.{0 if row['median_ms'] > 100 else 1}f} ms"}
    turns = [r for r in rows if r["candidate"] == "float32 eager" and r["model"] == row["model"]]
    star = "" if any(r["commit"] == row["commit"] for r in turns) else " *"
    decibel = row.get("sqnr_db", EXACT_DB)
    exactness = f", {decibel:.1f} dB" if decibel < EXACT_DB else ""
    return {row["model"]: f"{row['ratio']:.2f}x{exactness}{star}"}


def _own_first(row: Row) -> Any:
    name = row["candidate"]
    return (
        name != "float32 eager",
        not name.startswith("float32"),
        not name.startswith("qfx"),
        name,
        row["model"],
    )


def _linear(row: Row, rows: list[Row]) -> dict[str, str]:
    time = f"{row['median_us']:.0f} us" if row["median_us"] >= 100 else f"{row['median_us']:.1f} us"
    if row["isa"] == "float32":
        return {"float32": time}
    peak = row.get("percent_of_peak")
    return {row["isa"]: f"{time}, {row['speedup']:.1f}x" + (f", {peak} %" if peak else "")}


def _shape(row: Row) -> str:
    return str(row["shape"]).replace("x", " x ")


def _attention(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "float32": f"{row['float us']:.0f} us",
        row["isa"]: f"{row['us']:.0f} us, {row['of float']:.2f}x",
    }


def _product(row: Row, rows: list[Row]) -> dict[str, str]:
    speed = "" if row["form"] == "float32" else f", {row['speedup']:.2f}x"
    return {row["form"]: f"{row['median_us']:.0f} us{speed}"}


def _memory(row: Row, rows: list[Row]) -> dict[str, str]:
    found = {"us": f"{row['median_us']:.0f}", "GB/s": f"{row['gb_per_s']:.1f}"}
    if row["gmacs"] is not None:
        found |= {"GMAC/s": f"{row['gmacs']:.1f}", "of float32": f"{row['speedup']:.2f}x"}
    return found


def _cost(row: Row, rows: list[Row]) -> dict[str, str]:
    """Of all rows of the instruction set: how many are predicted within CLOSE."""
    own = [r for r in rows if r["isa"] == row["isa"]]
    errors = {"float": "float_error", "int8": "int8_error", "the gain": "ratio_error"}
    within = {n: sum(abs(r[key]) <= CLOSE for r in own) / len(own) for n, key in errors.items()}
    return {"shapes": str(len(own)), **{n: f"{100 * w:.0f} %" for n, w in within.items()}}


def _language(row: Row, rows: list[Row]) -> dict[str, str]:
    seconds = row.get("calibration s")
    return {
        "KL": f"{row['KL']:.4f}",
        "top-1": f"{row['top-1 %']:.1f} %",
        "perplexity": f"{row['perplexity']:.2f}",
        "capitals of the world": f"{row['capitals world %']:.1f} %",
        "common capitals": f"{row['capitals common-countries %']:.1f} %",
        "calibration": f"{seconds:.0f} s" if seconds else "",
        "schemes": row.get("schemes", ""),
    }


def _decibel(row: Row) -> str:
    return f"{row['SQNR dB']:.1f}" if row["SQNR dB"] < EXACT_DB else ""


def _encoder(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "texts, Pearson": f"{row['texts Pearson']:.4f}",
        "SimLex-999, Spearman": f"{row['simlex999 Spearman']:.4f}",
        "WordSim-353, Spearman": f"{row['wordsim353 Spearman']:.4f}",
        "SQNR dB": _decibel(row),
        "schemes": row.get("schemes", ""),
    }


def _vision(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "accuracy": f"{row['accuracy %']:.2f} %",
        "negative log likelihood": f"{row['nll']:.4f}",
        "SQNR dB": _decibel(row),
        "schemes": row.get("schemes", ""),
    }


def _learnt(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "accuracy": f"{row['accuracy %']:.2f} %",
        "negative log likelihood": f"{row['nll']:.3f}",
    }


def _training(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "s a step": f"{row['step_s']:.2f}",
        "speed": f"{row['speed']:.2f}x",
        "memory": f"{row['step_mb']:.0f} MB",
        "loss": f"{row['loss']:.3f}",
    }


def _prepare(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "CPU s": f"{row['cpu_s']:.1f}",
        "s on the wall": f"{row['wall_s']:.1f}",
        "of float32": f"{row['ratio']:.2f}",
    }


def _symmetry(row: Row, rows: list[Row]) -> dict[str, str]:
    kinds = ("symmetric", "asymmetric")
    return {k: f"{row[f'{k}_db']:.1f} dB, {row[f'{k}_us']:.0f} us" for k in kinds}


def _groups(row: Row, rows: list[Row]) -> dict[str, str]:
    kinds = ("64", "64 with zero points", "128", "all of K with zero points")
    return {"one scale a row": f"{row['int8_linear_us']:.0f} us"} | {
        kind: f"{row[kind]:.2f}" for kind in kinds
    }


def _rotation(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "plain": f"{row['plain_us']:.0f} us",
        "rotated": f"{row['rotated']:.3f}",
        "rotated, with a factor": f"{row['scaled']:.3f}",
    }


def _binary(row: Row, rows: list[Row]) -> dict[str, str]:
    time = f"{row['median_us']:.0f} us"
    return {row["isa"]: time if row["isa"] == "float32" else f"{time}, {row['speedup']:.1f}x"}


def _wrapper(row: Row, rows: list[Row]) -> dict[str, str]:
    return {"us a call": f"{row['median_us']:.2f}"}


def _parts(row: Row, rows: list[Row]) -> dict[str, str]:
    return {f"{row['mode']}, {row['layers']} layers": f"{row['median_us']:.1f} us"}


def _of(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


_TRAINING = (
    "A step of a small decoder; memory is what its tensors hold at most above weights and "
    "optimizer "
    "states. Kernels of {isa}."
)
_LINEAR = (
    "The int8 linear against float32 `F.linear`: time, speed against float32, and percent of "
    "what the "
    "multiply instructions alone reach in the same run. `7-bit`: weights and activations of "
    "7 bits, "
    "in percent of the 8-bit peak. {threads}."
)
SECTIONS = (
    Section(
        "models",
        "Whole models",
        "Models with random weights: speed against float32 eager, and the SQNR of the last hidden "
        "state (left out where it is float32 too). A star: another run than that of the "
        "others, against "
        "its own float32 eager.",
        "way",
        _of("candidate"),
        _model,
        order=_own_first,
    ),
    Section(
        "linear", "One linear", _LINEAR.format(threads="One thread"), "M x K x N", _shape, _linear
    ),
    Section(
        "linear-2-threads",
        "One linear",
        _LINEAR.format(threads="Two threads"),
        "M x K x N",
        _shape,
        _linear,
    ),
    Section(
        "attention",
        "Attention",
        "`int8_attention` against float32 `scaled_dot_product_attention`: time, and speed against "
        "float32. Shapes: batch, heads of queries / of keys, tokens, features.",
        "case",
        lambda row: f"{row['case']}: {_shape(row)}",
        _attention,
    ),
    Section(
        "bmm",
        "Products of activations",
        "Scores, values and whole attentions, of batch x heads x tokens x features, against "
        "float32. "
        "`products`: an attention as two products with a softmax between; `matmuls`: the "
        "same in float32.",
        "product",
        lambda row: f"{row['heads']} {row['what']}",
        _product,
    ),
    Section(
        "memory",
        "Memory bandwidth",
        "Few rows with cold weights of 4096 x 11008, and the quantizing of 512 x 4096 "
        "floats, against "
        "reading and copying.",
        "what",
        _of("case"),
        _memory,
    ),
    Section(
        "cost",
        "Cost model",
        "Random shapes between the points of its grid: how many are predicted within 20 %, of the "
        "float time, of the int8 time and of their ratio.",
        "kernels",
        _of("isa"),
        _cost,
    ),
    Section(
        "accuracy",
        "Trained models",
        "SmolLM2-135M: divergence (KL) of the next-token distribution from float, agreement of the "
        "likeliest token, perplexity, and questions for capitals that it answers rightly.",
        "setting",
        _of("setting"),
        _language,
        lambda row: row["model"] == "smollm",
        order=lambda row: row["setting"] != "float",
    ),
    Section(
        "accuracy",
        "Trained models",
        "MiniLM: correlation with human judgement of texts and of words.",
        "setting",
        _of("setting"),
        _encoder,
        lambda row: row["model"] == "minilm",
    ),
    Section(
        "accuracy",
        "Trained models",
        "A vision transformer on the 8x8 digits of scikit-learn.",
        "setting",
        _of("setting"),
        _vision,
        lambda row: row["model"] == "digits",
    ),
    Section(
        "symmetry",
        "Symmetric and asymmetric activations",
        "SQNR of the output and time, of every linear of MiniLM, both without rotation.",
        "linear",
        lambda row: f"{row['site']} {row['shape']}",
        _symmetry,
    ),
    Section(
        "groups",
        "Weights in groups",
        "Time of `int8_linear` with one scale a row, and of weights with a scale for each "
        "group of K, "
        "relative to it.",
        "kernel and M x K x N",
        lambda row: f"{row['isa']} {_shape(row)}",
        _groups,
    ),
    Section(
        "rotation",
        "Rotation",
        "Time of the dynamic linear, and of the same with K rotated in blocks of 64, "
        "relative to it.",
        "kernel and M x K x N",
        lambda row: f"{row['isa']} {_shape(row)}",
        _rotation,
    ),
    Section(
        "binary",
        "1-bit linears",
        "Signs of weights and activations against int8 and float32; the time includes taking "
        "the signs.",
        "M x K x N",
        _shape,
        _binary,
    ),
    Section(
        "training-avx512vnni",
        "Training steps",
        _TRAINING.format(isa="`avx512vnni`"),
        "way",
        _of("model"),
        _training,
    ),
    Section(
        "training-avx2",
        "Training steps",
        "The same with kernels of `avx2`.",
        "way",
        _of("model"),
        _training,
    ),
    Section(
        "digits",
        "Training to the end",
        "A vision transformer trained on the 8x8 digits of scikit-learn, and the float32 one "
        "made 4-bit "
        "(weights and activations, per tensor), without and with learned steps.",
        "model",
        _of("model"),
        _learnt,
    ),
    Section(
        "prepare",
        "Compiling",
        "To compile a model and call it once, in a fresh process with an empty Inductor cache.",
        "way",
        lambda row: f"{row['model']}, {row['candidate']}",
        _prepare,
    ),
    Section(
        "overhead",
        "A call's overhead",
        "The check of packed weights and the feeding of a compiled graph, for some numbers "
        "of weights.",
        "weights",
        lambda row: str(row["weights"]),
        _wrapper,
        lambda row: row["part"] == "wrapper",
    ),
    Section(
        "overhead",
        "A call's overhead",
        "A compiled model of small linears, taken apart: each figure is the difference of "
        "two runs.",
        "part",
        _of("part"),
        _parts,
        lambda row: row["part"] != "wrapper",
    ),
)
