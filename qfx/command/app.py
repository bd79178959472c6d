"""The subcommands of `qfx`. Each imports what it needs when it runs: `--help` loads no model code.

Exit codes: 0; 1 for input that cannot be used, with a sentence on stderr, and for a file that
`verify` finds wrong; 2 for words that the command does not know."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qfx.command.errors import one_sentence

app = typer.Typer(help="int8 for PyTorch.", no_args_is_help=True, add_completion=False)

Model = Annotated[
    str,
    typer.Argument(
        help="A folder or name of a transformers model, a folder of qfx.save, a .gguf or .pt2 file."
    ),
]
Scheme = Annotated[str | None, typer.Option(help="w8a8, w4a8, w8a16 or w4a16, or all its letters.")]
Skip = Annotated[
    list[str] | None, typer.Option(help="A name or pattern of modules that stay float; repeatable.")
]
Like = Annotated[
    str | None,
    typer.Option(help="The transformers model of a folder of qfx.save or a file of programs."),
]
Batch = Annotated[int, typer.Option(min=1, help="Sequences or images of the example input.")]
Tokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of each sequence of the example input.")
]
Words = Annotated[str | None, typer.Option(help="The text of the example input, repeated.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads; by default those of PyTorch.")]


@app.callback()
def _root() -> None:
    """int8 for PyTorch."""


@app.command()
def info(as_json: AsJson = False) -> None:
    """Print versions, processor, kernels and caches, which a report of a defect needs."""
    from qfx.command.facts import facts

    _print_facts(facts(), as_json)


@app.command()
def cache(clear: bool = typer.Option(False, "--clear", help="Remove the files.")) -> None:
    """Print the folder with cached cost tables and programs, or remove it."""
    from qfx.io.disk_cache import cached_files, remove_cached_files

    folder, files = cached_files()
    size = sum(file.stat().st_size for file in files)
    if clear:
        remove_cached_files()
    print(f"{'removed ' if clear else ''}{folder}: {len(files)} files, {size} bytes")


@app.command()
@one_sentence
def explain(
    model: Model,
    scheme: Scheme = None,
    skip: Skip = None,
    like: Like = None,
    batch: Batch = 1,
    tokens: Tokens = None,
    text: Words = None,
    threads: Threads = None,
    html: Annotated[Path | None, typer.Option(help="Also write the report as a page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what qfx does to each matmul of a model, and why: scheme, error, time."""
    from qfx.command.explain import explained, shown
    from qfx.command.open_model import open_model

    _set_threads(threads)
    with _working(f"reading {model}") as now:
        opened = open_model(model, like=like, batch=batch, tokens=tokens, text=text)
        now(f"running {model} in float and in int8")
        report = explained(opened, _options(scheme, skip))
    print(shown(report, html, as_json))


@app.command()
@one_sentence
def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(help="A new folder or file.")],
    scheme: Annotated[str, typer.Option(help="w8a8, w4a8, w8a16 or w4a16.")] = "w8a8",
    skip: Skip = None,
    to: Annotated[str, typer.Option(help="transformers, qfx, programs, exported or onnx.")] = (
        "transformers"
    ),
    max_length: Annotated[int, typer.Option(min=1, help="Tokens of a file of programs.")] = 2048,
    batch: Batch = 1,
    tokens: Tokens = None,
) -> None:
    """Quantize the weights of a float model and write it."""
    from qfx.command.quantize import quantized
    from qfx.command.write_model import write_model

    with _working(f"quantizing {model}") as now:
        opened = quantized(model, scheme, skip or [], batch=batch, tokens=tokens)
        now(f"writing {out}")
        told = write_model(opened, out, to, max_length)
    print(told)


@app.command()
@one_sentence
def convert(
    model: Model,
    out: Annotated[Path, typer.Argument(help="A new folder or file.")],
    to: Annotated[str, typer.Option(help="transformers, qfx, programs, exported or onnx.")],
    like: Like = None,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens of a file of programs.")] = 2048,
    batch: Batch = 1,
    tokens: Tokens = None,
) -> None:
    """Write a model in another form, with the codes that it has."""
    from qfx.command.open_model import open_model
    from qfx.command.write_model import write_model

    with _working(f"reading {model}") as now:
        opened = open_model(model, like=like, batch=batch, tokens=tokens)
        now(f"writing {out}")
        told = write_model(opened, out, to, max_length)
    print(told)


@app.command()
@one_sentence
def bench(
    model: Model,
    scheme: Scheme = None,
    like: Like = None,
    batch: Batch = 1,
    tokens: Tokens = None,
    rounds: Annotated[int, typer.Option(min=1, help="Calls of each, by turns.")] = 7,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Time a model in float, under Inductor and in int8, by turns in one run."""
    from qfx.command.bench import timings
    from qfx.command.open_model import open_model
    from qfx.report.plain_report import finite

    _set_threads(threads)
    with _working(f"reading {model}") as now:
        opened = open_model(model, like=like, batch=batch, tokens=tokens)
        rows = timings(opened, _options(scheme, None) or {}, rounds, now)
    if as_json:
        print(json.dumps(finite([asdict(row) for row in rows]), indent=2))
        return
    table = Table(box=None)
    for head in ("", "first result, s", "a call, ms", "speed", "SQNR, dB"):
        table.add_column(head, justify="left" if not head else "right")
    base = rows[0].call_s
    for row in rows:
        if row.call_s is None or base is None:
            table.add_row(row.way, Text(f"did not run: {row.reason}"))
            continue
        db = "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}"
        times = f"{row.first_s:.1f}", f"{row.call_s * 1e3:.1f}", f"{base / row.call_s:.2f}x"
        table.add_row(row.way, *times, db)
    Console().print(table)


@app.command()
@one_sentence
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text that the model continues.")],
    new: Annotated[int, typer.Option(min=1, help="The largest number of new tokens.")] = 64,
    scheme: Scheme = None,
    like: Like = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text with a language model, whose steps run as int8 programs."""
    from qfx.command.generate import generated, generated_by_programs
    from qfx.command.model_kinds import kind_of
    from qfx.command.open_model import open_model, open_tokenizer

    _set_threads(threads)
    if kind_of(model) == "programs":
        if scheme is not None:
            raise ValueError(f"{model} has codes already: --scheme is for float models")
        words = open_tokenizer(model, like)
        found = generated_by_programs(model, *words, prompt, new, streamed=not as_json)
    else:
        opened = open_model(model, like=like)
        found = generated(opened, prompt, new, scheme, streamed=not as_json)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    rate = "" if found.token_s is None else f", then {1 / found.token_s:.1f} tokens/s"
    print(f"{found.tokens} tokens, the first after {found.first_s:.1f} s{rate}", file=sys.stderr)


@app.command()
@one_sentence
def verify(
    model: Annotated[str, typer.Argument(help="A file of programs, or a model.")],
    reference: Annotated[
        str | None, typer.Option(help="The float model, with which a model is compared.")
    ] = None,
    expect: Annotated[
        str | None, typer.Option(help="The hash that the file of programs had elsewhere.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what a saved model computes: a file of programs by a hash of its outputs, which is the
    same on every processor, another model by its SQNR to a reference."""
    from qfx.command.model_kinds import kind_of
    from qfx.command.verify import compared, hashes_of

    if kind_of(model) == "programs":
        with _working(f"running {model}"):
            found = hashes_of(model)
        right = found.agree and expect in (None, *found.by_isa.values())
        _print_facts(found.by_isa, as_json)
        if not right:
            raise ValueError(
                "the instruction sets of this machine compute different outputs"
                if not found.agree
                else f"the outputs are not those of the hash {expect}"
            )
        return
    if reference is None:
        raise ValueError(f"{model} is no file of programs: name its float model with --reference")
    from qfx.command.open_model import open_model

    with _working(f"comparing {model} with {reference}"):
        db = compared(open_model(model, like=reference), open_model(reference))
    _print_facts({"SQNR, dB": "none" if db is None else f"{db:.1f}"}, as_json)


@contextmanager
def _working(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal's stderr what the command does, until it is done. Gives a function that
    changes the text."""
    with Console(stderr=True).status(escape(text)) as status:
        yield lambda now: status.update(escape(now))


def _options(scheme: str | None, skip: list[str] | None) -> dict[str, Any] | None:
    options = {"scheme": scheme, "skip": skip}
    return {name: value for name, value in options.items() if value} or None


def _set_threads(count: int | None) -> None:
    import torch

    if count is not None:
        torch.set_num_threads(count)


def _print_facts(found: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(box=None, show_header=False)
    for name, value in found.items():
        table.add_row(name, Text(value, overflow="fold"))
    Console().print(table)
