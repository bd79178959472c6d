"""The tables of docs/results.md: the rows of a saved file that each shows, and how it prints
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import results_cells as cells
from benchmarks.results_decoding import DECODING
from benchmarks.results_table import Row, Section, of
from benchmarks.settings import SETTINGS


def _listed(row: Row) -> Any:
    """Returns a sort key: float first, then the settings in the order of benchmarks/settings.py,
    then others."""
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
    "The int8 linear compared with float32 `F.linear`: time, speed relative to float32, and "
    "percent of the peak that the multiply instructions alone reach in the same run. `7-bit`: "
    "weights and activations of 7 bits, in percent of the 8-bit peak."
)
SECTIONS = (
    Section(
        "models",
        "Whole models",
        "Models with random weights. Each cell gives the speed relative to float32 eager, and the "
        "SQNR of the last hidden state (left out for float32). A star marks a result of another "
        "run, relative to the float32 eager of that run. The lines below each table give the rank "
        "of qfx by speed among all candidates that ran and are not qfx.",
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
        "The int8 linear on several threads.",
        "M x K x N",
        lambda row: f"{cells.shape(row)}, {row['threads']} threads",
        cells.linear,
    ),
    Section(
        "attention",
        "Attention",
        "`int8_attention` compared with float32 `scaled_dot_product_attention`: time, and speed "
        "relative to float32. Shapes: batch, heads of queries / of keys, tokens, features.",
        "case",
        lambda row: f"{row['case']}: {cells.shape(row)}",
        cells.attention,
    ),
    Section(
        "attention-errors",
        "Attention",
        "Errors of `int8_attention`: SQNR of its outputs in dB. The row `divergence` gives the KL "
        "divergence of the next token from that with float attention.",
        "case",
        of("case"),
        lambda row, rows: {"int8": str(row["here"])},
    ),
    Section(
        "bmm",
        "Products of activations",
        "Scores, values and whole attentions of batch x heads x tokens x features, compared with "
        "float32. `products`: attention as two int8 products with a softmax between them. "
        "`matmuls`: the same in float32.",
        "product",
        lambda row: f"{row['heads']} {row['what']}",
        cells.product,
    ),
    Section(
        "memory",
        "Memory bandwidth",
        "Products of few tokens with weights of 4096 x 11008 that are in no cache, and quantizing "
        "512 x 4096 floats, compared with reading and copying memory.",
        "what",
        of("case"),
        cells.memory,
    ),
    Section(
        "bandwidth",
        "Bandwidth by prefetch hint",
        "A linear of 4096 x 4096 with few rows (tokens). Several such weights, of the given size "
        "in total, are used in turn. Cells give the memory rate relative to the rate at which "
        "torch sums the same bytes. `t0+2048` prefetches into all caches, 2048 bytes ahead.",
        "kernels, rows, weights",
        lambda row: f"{row['isa']}, {row['rows']}, {row['megabytes']} MB",
        cells.bandwidth,
    ),
    Section(
        "cost",
        "Cost model",
        "Random shapes between the grid points of the cost model: the share of shapes for which "
        "the float time, the int8 time and their ratio are predicted within 20 %.",
        "kernels",
        of("isa"),
        cells.cost,
    ),
    _trained(
        "smollm",
        cells.language,
        "SmolLM2-135M: KL divergence of the next-token distribution from float, agreement of the "
        "most likely token with float, perplexity, and questions for capitals answered correctly.",
    ),
    _trained(
        "whisper",
        cells.speech,
        "Whisper base, on 13 clips of speech: divergence and agreement as above, after the tokens "
        "that float transcribed, and the clips for which int8 gives the same text as float.",
    ),
    _trained(
        "minilm",
        cells.encoder,
        "MiniLM: the distance of its text embeddings from those of float, and their correlation "
        "with human judgements of texts and of words.",
    ),
    _trained("mpnet", cells.encoder, "all-mpnet-base-v2, evaluated like MiniLM."),
    _trained("digits", cells.vision, "A vision transformer on the 8x8 digits of scikit-learn."),
    Section(
        "symmetry",
        "Symmetric and asymmetric activations",
        "SQNR of the output, and time, for every linear of MiniLM. Both variants are without "
        "rotation.",
        "linear",
        lambda row: f"{row['site']} {row['shape']}",
        cells.symmetry,
    ),
    Section(
        "groups",
        "Groups of K",
        "Time of the rotated dynamic linear with one scale per row. The other columns give the "
        "time with a scale for each group of K in weights and activations, relative to the first.",
        "kernel and M x K x N",
        lambda row: f"{row['isa']} {cells.shape(row)}",
        cells.groups,
    ),
    Section(
        "packed",
        "Four and five bits",
        "Speed of linears whose weights are stored in 4 and 5 bits, in groups of K, relative to "
        "int8 with one scale per row. Several weights of each kind are used in turn, more than the "
        "caches can hold.",
        "kernel and M x K x N",
        lambda row: f"{row['isa']} {cells.shape(row)}",
        cells.packed,
    ),
    Section(
        "rotation",
        "Rotation",
        "Time of the dynamic linear, and relative to it the time with K rotated in blocks of 64.",
        "kernel and M x K x N",
        lambda row: f"{row['isa']} {cells.shape(row)}",
        cells.rotation,
    ),
    Section(
        "binary",
        "1-bit linears",
        "1-bit weights and activations compared with int8 and float32. The time includes computing "
        "the signs.",
        "M x K x N",
        cells.shape,
        cells.binary,
    ),
    Section(
        r"training-\w+",
        "Training steps",
        "A training step of a small decoder. Memory is the peak of its tensors in addition to "
        "weights and optimizer states.",
        "way",
        lambda row: f"{row['model']}, {row['isa']}",
        cells.training,
    ),
    Section(
        "digits",
        "Training to the end",
        "A vision transformer trained on the 8x8 digits of scikit-learn, and the float32 model "
        "converted to 4 bits (weights and activations, one scale per tensor), without and with "
        "learned steps.",
        "model",
        of("model"),
        cells.learnt,
    ),
    Section(
        "lora",
        "LoRA",
        "A LoRA step with PEFT on SmolLM2-135M, 4 x 128 tokens, rank 8 on all linears except the "
        "head: CPU seconds, the memory of the base, the peak of further memory in a step, and the "
        "loss of the first and of the last of 20 steps on the same tokens.",
        "base",
        of("base"),
        cells.lora,
        below=cells.not_run,
    ),
    *DECODING,
    Section(
        "citizens",
        "What a user types, and what comes of it",
        "SmolLM2-135M with transformers and PEFT, by several libraries. The lines are counted in "
        "`benchmarks/typed.py`, the code that ran. Quantize: SQNR of the logits, and the share of "
        "most likely tokens that equal those of float32. Save: the size of the file. Load: growth "
        "of the peak of resident memory, first token included, relative to the file. Generate: 32 "
        "tokens without sampling, and how many of them float32 would choose at their place. "
        "Fine-tune: 5 steps of LoRA, and the cosine between the first gradient and that of "
        "float32. Merge: the share of the decrease of the loss that remains. Silently wrong: the "
        "task ran without an error, but less than half of the float32 effect remains, or saving "
        "changes logits.",
        "library",
        of("library"),
        cells.citizen,
        below=cells.went_wrong,
    ),
    Section(
        "prepare",
        "Compiling",
        "Time to compile a model and call it once, in a fresh process with an empty "
        "Inductor cache.",
        "way",
        lambda row: f"{row['model']}, {row['candidate']}",
        cells.prepare,
    ),
    Section(
        "overhead",
        "A call's overhead",
        "Time per call to check packed weights and pass them to a compiled graph, by number of "
        "weights.",
        "weights",
        lambda row: str(row["weights"]),
        cells.wrapper,
        lambda row: row["part"] == "wrapper",
    ),
    Section(
        "overhead",
        "A call's overhead",
        "The parts of a call of a compiled model of small linears. Each number is the difference "
        "of two runs.",
        "part",
        of("part"),
        cells.parts,
        lambda row: row["part"] != "wrapper",
    ),
)
