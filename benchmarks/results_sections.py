"""The tables of docs/results.md: which rows of a saved file each shows, and how it prints them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import results_cells as cells
from benchmarks.results_decoding import DECODING
from benchmarks.results_table import Row, Section, of
from benchmarks.settings import SETTINGS


def _listed(row: Row) -> Any:
    """Float first, then the settings as benchmarks/settings.py lists them, then others."""
    known = ["float", *SETTINGS]
    return known.index(row["setting"]) if row["setting"] in known else len(known)


def _trained(model: str, columns: Callable[[Row, list[Row]], dict[str, str]], text: str) -> Section:
    return Section(
        "accuracy",
        "Trained models",
        text,
        "setting",
        of("setting"),
        columns,
        lambda row: row["model"] == model,
        _listed,
    )


_LINEAR = (
    "The int8 linear against float32 `F.linear`: time, speed against float32, and percent of what "
    "the multiply instructions alone reach in the same run. `7-bit`: weights and activations of 7 "
    "bits, in percent of the 8-bit peak."
)
SECTIONS = (
    Section(
        "models",
        "Whole models",
        "Models with random weights: speed against float32 eager, and the SQNR of the last hidden "
        "state (left out where it is float32 too). A star: another run than that of the "
        "others, against its own float32 eager. Below each table: where qfx stands among all that "
        "ran and is not qfx, by these speeds.",
        "way",
        of("candidate"),
        cells.model,
        order=cells.own_first,
        table=of("model"),
        below=cells.places,
    ),
    Section("linear", "One linear", _LINEAR, "M x K x N", cells.shape, cells.linear),
    Section(
        r"linear-\d+-threads",
        "One linear",
        "The same on several threads.",
        "M x K x N",
        lambda row: f"{cells.shape(row)}, {row['threads']} threads",
        cells.linear,
    ),
    Section(
        "attention",
        "Attention",
        "`int8_attention` against float32 `scaled_dot_product_attention`: time, and speed against "
        "float32. Shapes: batch, heads of queries / of keys, tokens, features.",
        "case",
        lambda row: f"{row['case']}: {cells.shape(row)}",
        cells.attention,
    ),
    Section(
        "attention-errors",
        "Attention",
        "SQNR of its outputs in dB; of `divergence` the KL of the next token from float attention.",
        "case",
        of("case"),
        lambda row, rows: {"int8": str(row["here"])},
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
        cells.product,
    ),
    Section(
        "memory",
        "Memory bandwidth",
        "Few rows with cold weights of 4096 x 11008, and the quantizing of 512 x 4096 "
        "floats, against "
        "reading and copying.",
        "what",
        of("case"),
        cells.memory,
    ),
    Section(
        "bandwidth",
        "Bandwidth by prefetch hint",
        "A linear of 4096 x 4096 and few rows, its weights in turn of so many megabytes: the share "
        "of the rate at which torch sums the same bytes. `t0+2048` fetches into all caches 2048 "
        "bytes ahead.",
        "kernels, rows, weights",
        lambda row: f"{row['isa']}, {row['rows']}, {row['megabytes']} MB",
        cells.bandwidth,
    ),
    Section(
        "cost",
        "Cost model",
        "Random shapes between the points of its grid: how many are predicted within 20 %, of the "
        "float time, of the int8 time and of their ratio.",
        "kernels",
        of("isa"),
        cells.cost,
    ),
    _trained(
        "smollm",
        cells.language,
        "SmolLM2-135M: divergence (KL) of the next-token distribution from float, agreement of the "
        "likeliest token, perplexity, and questions for capitals that it answers rightly.",
    ),
    _trained(
        "whisper",
        cells.speech,
        "Whisper base, on 13 clips of speech: the same divergence and agreement, behind the tokens "
        "that float heard, and clips of which int8 would hear the same text as float.",
    ),
    _trained(
        "minilm",
        cells.encoder,
        "MiniLM: how far its embeddings of texts are from float's, and their correlation with "
        "human judgement of texts and of words.",
    ),
    _trained("mpnet", cells.encoder, "all-mpnet-base-v2, judged as MiniLM is."),
    _trained("digits", cells.vision, "A vision transformer on the 8x8 digits of scikit-learn."),
    Section(
        "symmetry",
        "Symmetric and asymmetric activations",
        "SQNR of the output and time, of every linear of MiniLM, both without rotation.",
        "linear",
        lambda row: f"{row['site']} {row['shape']}",
        cells.symmetry,
    ),
    Section(
        "groups",
        "Groups of K",
        "Time of the dynamic linear, rotated, with one scale a row, and of weights and "
        "activations with a scale for each group of K, relative to it.",
        "kernel and M x K x N",
        lambda row: f"{row['isa']} {cells.shape(row)}",
        cells.groups,
    ),
    Section(
        "packed",
        "Four and five bits",
        "Speed of linears whose weights are stored in 4 and 5 bits, in groups of K, relative to "
        "int8 with one scale a row; more weights of each kind are read in turn than caches hold.",
        "kernel and M x K x N",
        lambda row: f"{row['isa']} {cells.shape(row)}",
        cells.packed,
    ),
    Section(
        "rotation",
        "Rotation",
        "Time of the dynamic linear, and of the same with K rotated in blocks of 64, "
        "relative to it.",
        "kernel and M x K x N",
        lambda row: f"{row['isa']} {cells.shape(row)}",
        cells.rotation,
    ),
    Section(
        "binary",
        "1-bit linears",
        "Signs of weights and activations against int8 and float32; the time includes taking "
        "the signs.",
        "M x K x N",
        cells.shape,
        cells.binary,
    ),
    Section(
        r"training-\w+",
        "Training steps",
        "A step of a small decoder; memory is what its tensors hold at most above weights and "
        "optimizer states.",
        "way",
        lambda row: f"{row['model']}, {row['isa']}",
        cells.training,
    ),
    Section(
        "digits",
        "Training to the end",
        "A vision transformer trained on the 8x8 digits of scikit-learn, and the float32 one "
        "made 4-bit "
        "(weights and activations, per tensor), without and with learned steps.",
        "model",
        of("model"),
        cells.learnt,
    ),
    Section(
        "lora",
        "LoRA",
        "A step of LoRA by PEFT on SmolLM2-135M, 4 x 128 tokens, rank 8 on all linears but the "
        "head: seconds of the processor; what the base holds, and what steps need at most above "
        "it; the loss of the first and of the last of 20 steps on the same tokens.",
        "base",
        of("base"),
        cells.lora,
        below=cells.not_run,
    ),
    *DECODING,
    Section(
        "citizens",
        "What a user types, and what comes of it",
        "SmolLM2-135M by transformers and PEFT. Lines are counted in `benchmarks/typed.py`, which "
        "is what ran. Quantize: SQNR of the logits, and how many of the likeliest tokens are "
        "float32's. Save: the file. Load: growth of the peak of resident memory, first token "
        "included, as a part of the file. Generate: 32 tokens without sampling, and how many of "
        "them float32 would choose there. Fine-tune: 5 steps of LoRA, the cosine of the first "
        "gradient to float32's. Merge: how much is kept of what the loss fell by. Silently wrong: "
        "it ran, and less than half of what float32 does is left, or logits change by saving.",
        "library",
        of("library"),
        cells.citizen,
        below=cells.went_wrong,
    ),
    Section(
        "prepare",
        "Compiling",
        "To compile a model and call it once, in a fresh process with an empty Inductor cache.",
        "way",
        lambda row: f"{row['model']}, {row['candidate']}",
        cells.prepare,
    ),
    Section(
        "overhead",
        "A call's overhead",
        "The check of packed weights and the feeding of a compiled graph, for some numbers "
        "of weights.",
        "weights",
        lambda row: str(row["weights"]),
        cells.wrapper,
        lambda row: row["part"] == "wrapper",
    ),
    Section(
        "overhead",
        "A call's overhead",
        "A compiled model of small linears, taken apart: each figure is the difference of "
        "two runs.",
        "part",
        of("part"),
        cells.parts,
        lambda row: row["part"] != "wrapper",
    ),
)
