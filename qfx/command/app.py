"""The subcommands of `qfx`."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

app = typer.Typer(help="int8 for PyTorch.", no_args_is_help=True, add_completion=False)


@app.callback()
def _root() -> None:
    """int8 for PyTorch."""


@app.command()
def info(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Print versions, processor, kernels and caches, which a report of a defect needs."""
    from qfx.command.facts import facts

    found = facts()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(box=None, show_header=False)
    for name, value in found.items():
        table.add_row(name, Text(value, overflow="fold"))
    Console().print(table)


@app.command()
def cache(clear: bool = typer.Option(False, "--clear", help="Remove the files.")) -> None:
    """Print the folder with cached cost tables and programs, or remove it."""
    from qfx.io.disk_cache import cached_files, remove_cached_files

    folder, files = cached_files()
    size = sum(file.stat().st_size for file in files)
    if clear:
        remove_cached_files()
    print(f"{'removed ' if clear else ''}{folder}: {len(files)} files, {size} bytes")
