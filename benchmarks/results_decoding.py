"""The tables of docs/results.md about language models that write."""

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
        found["loop"] = f"{row['loop_ms']:.1f} ms"
    found["weights"] = f"{row['weights_mb']:.0f} MB"
    found["of reading"] = f"{100 * row['share_of_read']:.0f} %"
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
        found[f"{row['way']}, gain of what bytes allow"] = (
            f"{row['gain']:.2f} of {row['allowed']:.2f}, {row['share']:.0%}"
        )
    return found


def texts(row: Row, rows: list[Row]) -> dict[str, str]:
    return {
        "tokens as float": f"{row['same_tokens']:.1%}",
        "parts at token": f"{row['first']:g}" if row["first"] < row["tokens"] else "never",
        "texts as float": f"{row['whole']} of {row['texts']}",
        "KL": f"{row['kl']:.4f}",
        "likeliest as float": f"{row['likeliest']:.1%}",
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
        "of the second conversation": str(row["graphs_second"]),
    }


DECODING = (
    Section(
        "decode",
        "Decoding",
        "SmolLM2-135M, and two models of random weights, greedily: tokens a second of reading the "
        "prompt, of `generate` and of its step alone, one call of the model a token; what "
        "`generate` takes beside it (loop). The weights that a step reads, and its speed as a part "
        "of what reading them alone would allow. Where a step's time goes, by the shares of a "
        "profile: linears, attention, the rest of the graph, guards, other Python. SQNR of the "
        "first steps' logits.",
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
        "Steps of several texts: tokens a second, and how many times those of one text that is, of "
        "what the bytes of a step allow: int8 weights, which are read once, and the keys and "
        "values that each text sees, at the rate at which memory was read beside it.",
        "batch",
        lambda row: str(row["batch"]),
        batches,
        table=lambda row: f"{row['model']}, context {row['context']}, {threads(row)}",
    ),
    Section(
        "decode-texts",
        "Decoding",
        "Texts that SmolLM2-135M writes greedily behind the beginnings of news texts: the share of "
        "tokens that are float's, the token at which texts part from float's (median), and, along "
        "float's texts, the divergence (KL) of the next token's distribution and the share of "
        "likeliest tokens that are float's.",
        "way",
        of("way"),
        texts,
    ),
    Section(
        "first-token",
        "Decoding",
        "From a loaded SmolLM2-135M to the first token of `generate` behind 128 others, and to the "
        "end of 8, compiling included, in a fresh process: with an empty and with a filled folder "
        "of what is kept on disk.",
        "way",
        lambda row: f"{row['way']}, {threads(row)}",
        first,
        below=partial(not_run, key="way"),
    ),
    Section(
        "decode-long",
        "Decoding",
        "Resident memory of SmolLM2-135M in a text of 5,000 tokens with a cache of 5,120, float "
        "weights included where they are kept; graphs compiled by its end, and in a second "
        "conversation with a prompt of another length.",
        "way",
        lambda row: f"{row['way']}, {threads(row)}",
        memory,
        below=partial(not_run, key="way"),
    ),
)
