"""The tables of docs/results.md about decoding with language models."""

from __future__ import annotations

from functools import partial

from benchmarks.results_cells import EXACT_DB, not_run, threads
from benchmarks.results_table import Row, Section, of


def speed(row: Row, rows: list[Row]) -> dict[str, str]:
    if "reason" in row:
        return {"step, tokens/s": "not run"}
    found = {"prefill, tokens/s": f"{row['prefill_tokens_s']:.0f}"}
    if "generate_tokens_s" in row:
        found["generate, tokens/s"] = f"{row['generate_tokens_s']:.1f}"
    found["step, tokens/s"] = f"{row['step_tokens_s']:.1f}"
    found["step"] = f"{row['step_ms']:.1f} ms"
    if "loop_ms" in row:
        found["generate, rest"] = f"{row['loop_ms']:.1f} ms"
    found["weights"] = f"{row['weights_mb']:.0f} MB"
    found["of memory rate"] = f"{100 * row['share_of_read']:.0f} %"
    parts = ("linears", "attention", "graph", "guards", "python")
    if "linears_ms" in row:
        found[", ".join(parts)] = ", ".join(f"{row[f'{p}_ms']:.1f}" for p in parts) + " ms"
    decibel = row.get("logits_sqnr_db", EXACT_DB)
    found["logits"] = f"{decibel:.1f} dB" if decibel < EXACT_DB else ""
    return found


def batches(row: Row, rows: list[Row]) -> dict[str, str]:
    found = {
        f"{row['way']}, tokens/s": f"{row['tokens_s']:.1f}",
        f"{row['way']}, step": f"{row['step_ms']:.1f} ms",
    }
    if "share" in row:
        found[f"{row['way']}, gain of possible gain"] = (
            f"{row['gain']:.2f} of {row['allowed']:.2f}, {row['share']:.0%}"
        )
    return found


def texts(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "equal tokens": f"{row['same_tokens']:.1%}",
        "first difference": f"{row['first']:g}" if row["first"] < row["tokens"] else "never",
        "equal texts": f"{row['whole']} of {row['texts']}",
        "KL": f"{row['kl']:.4f}",
        "equal top-1": f"{row['likeliest']:.1%}",
    }


def first(row: Row, rows: list[Row]) -> dict[str, str]:
    if "reason" in row:
        return {f"first token, {row['cache']}": "not run"}
    return {
        f"{what}, {row['cache']}": f"{row[f'{key}_s']:.1f} s, CPU {row[f'{key}_cpu_s']:.1f} s"
        for what, key in (("first token", "first"), ("8 tokens", "all"))
    }


def memory(row: Row, rows: list[Row]) -> dict[str, str]:
    if "reason" in row:
        return {"graphs": "not run"}
    marks = [int(key.removeprefix("mb_")) for key in row if key.startswith("mb_")]
    return {
        **{f"{mark} tokens": f"{row[f'mb_{mark}']:.0f} MB" for mark in sorted(marks)},
        "graphs": str(row["graphs"]),
        "graphs, second conversation": str(row["graphs_second"]),
    }


DECODING = (
    Section(
        "decode",
        "Decoding",
        "Greedy decoding with SmolLM2-135M and with two models of random weights. prefill: tokens "
        "per second of reading the prompt. generate: tokens per second of `generate`. step: "
        "tokens per second, and time, of one decoding step alone, which is one call of the model. "
        "generate, rest: time of `generate` per token in addition to the step. weights: bytes of "
        "weights that a step reads. of memory rate: speed of the step relative to that of reading "
        "these bytes alone. linears, attention, graph, guards, python: parts of a step's time by "
        "a profile, where graph is the rest of the graph and python is other Python code. logits: "
        "SQNR of the first steps' logits.",
        "way",
        of("way"),
        speed,
        table=lambda row: (
            f"{row['model']}, batch {row['batch']}, context {row['context']}, {threads(row)}"
        ),
        below=partial(not_run, key="way"),
    ),
    Section(
        "decode-batches",
        "Decoding",
        "Decoding steps by batch size: tokens per second, and time of a step. `4.92 of 7.22, 68%` "
        "reads: 4.92 times the tokens per second of batch size 1, where the bytes of a step would "
        "allow 7.22 times, which is 68 %. The bytes are the int8 weights, read once, and the keys "
        "and values that each sequence sees, at the memory rate measured in the same run.",
        "batch",
        lambda row: str(row["batch"]),
        batches,
        table=lambda row: f"{row['model']}, context {row['context']}, {threads(row)}",
    ),
    Section(
        "decode-texts",
        "Decoding",
        "Greedy text of SmolLM2-135M after the beginnings of news texts, compared with that of "
        "the float model. equal tokens: share of equal tokens. first difference: position of the "
        "first token that differs (median). equal texts: number of equal texts. KL and equal "
        "top-1: along the float text, divergence of the next-token distribution, and share of "
        "equal most likely tokens.",
        "way",
        of("way"),
        texts,
    ),
    Section(
        "first-token",
        "Decoding",
        "Time from a loaded SmolLM2-135M to the first token of `generate` after a prompt of 128 "
        "tokens, and to the eighth token, compilation included, in a fresh process: with empty and "
        "with filled caches on disk.",
        "way",
        lambda row: f"{row['way']}, {threads(row)}",
        first,
        below=partial(not_run, key="way"),
    ),
    Section(
        "decode-long",
        "Decoding",
        "Resident memory of SmolLM2-135M while it generates 5,000 tokens with a cache of 5,120, "
        "including float weights if they are kept. graphs: graphs compiled by the end, and in a "
        "second conversation with a prompt of another length.",
        "way",
        lambda row: f"{row['way']}, {threads(row)}",
        memory,
        below=partial(not_run, key="way"),
    ),
)
