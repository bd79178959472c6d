"""save_program, load_program: a program of fixed shapes, such as an encoder's, in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from qfx.files.tensor_file import safetensors, write_tensors
from qfx.generate.decoder import KEY, read_programs
from qfx.generate.program_file import (
    FORMAT,
    Held,
    check_memory,
    check_work,
    number_of_bytes,
    weight_bytes,
)
from qfx.io.atomic_write import write_file
from qfx.io.errors import UserError, printable
from qfx.programs import Runner
from qfx.programs.inputs import View
from qfx.programs.serialization import Storing, restored


def save_program(runner: Runner, path: str | Path) -> None:
    """Writes a program for inputs of fixed shapes, and the weights that it uses, to one safetensors
    file.

        save_program(qfx.programs.build(gm, inputs), "encoder.safetensors")

    `load_program` of the same version of qfx reads the file on any processor; C++ reads it without
    Python and PyTorch (`qfx_program_load`). Raises ValueError if a part of the program can only run
    in PyTorch, if it writes to its inputs, and if it returns anything but tensors.
    """
    safetensors()
    if others := [type(r).__name__ for r in runner.results if not isinstance(r, View)]:
        raise UserError(f"a program whose results are tensors can be saved, and one is {others[0]}")
    storing = Storing()
    described = storing.described(runner)
    _check_before(described, storing.tensors, None)
    _check_after(runner, storing.tensors)
    metadata = {KEY: json.dumps({"format": FORMAT, "graph": described})}
    write_file(Path(path), lambda file: write_tensors(file, storing.tensors, metadata))


def load_program(path: str | Path, *, max_memory: int | None = None) -> Runner:
    """Reads a file that `save_program` wrote. The file may come from an untrusted source: it
    contains no code.

        encoder = load_program("encoder.safetensors")
        (result,) = encoder(x)

    `max_memory`: the largest number of bytes that weights, inputs, results and working memory may
    take, by default the memory of the machine. Raises ValueError for a file that `save_program` did
    not write, and for one that needs more memory or operations than its sizes account for; OSError
    if the file cannot be read.
    """
    return read_programs(path, lambda about, tensors: graph_runner(about, tensors, max_memory))


def graph_runner(
    description: Any, tensors: Mapping[str, Tensor], max_memory: int | None = None
) -> Runner:
    """Returns the runner for the description and the tensors of a file. Raises UserError for what
    `load_program` refuses."""
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        form = description.get("format") if isinstance(description, dict) else description
        raise UserError(
            f"the program has format {printable(repr(form))}, and this qfx reads format {FORMAT}: "
            "save it again with this qfx"
        )
    if "graph" not in description:
        raise UserError("the file holds a language model: load_programs reads it")
    _check_before(description["graph"], tensors, max_memory)
    runner = restored(description["graph"], tensors)
    _check_after(runner, tensors)
    return runner


def _check_before(
    described: Mapping[str, Any], tensors: Mapping[str, Tensor], max_memory: int | None
) -> None:
    """Raises UserError if the program needs more memory than its weights, inputs and results
    account for, or than there is."""
    results = [number_of_bytes(n) for n in described["made"]]
    inputs = [
        number_of_bytes(prod(map(number_of_bytes, sizes)) * _ITEM.get(name, 8))
        for name, sizes in described["inputs"]
    ]
    working = number_of_bytes(described["bytes"][0])
    held = Held("the program", "inputs and results", sum(inputs) + sum(results))
    check_memory(weight_bytes(tensors), held, working, max_memory)


_ITEM = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "bool": 1}


def _check_after(runner: Runner, tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError if the program writes to its inputs, or takes more operations than its
    weights and elements account for."""
    if runner.writes(range(len(runner.inputs))):
        raise UserError("the program writes to its inputs, and may write only to its results")
    elements = 1 + sum(prod(view.sizes) for view in (*runner.inputs, *runner.results))
    check_work("the program", runner.work, elements, weight_bytes(tensors), 0, 0)
