"""save_programs: writes the programs of a model to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qfx.files.tensor_file import safetensors, write_tensors
from qfx.generate.decoder import KEY
from qfx.generate.program_file import FORMAT
from qfx.generate.steps import Steps
from qfx.io.atomic_write import write_file
from qfx.io.errors import UserError
from qfx.programs.serialization import Storing


def save_programs(model: Any, path: str | Path, *, batch_size: int = 1) -> None:
    """Writes the programs of a model for this batch size, and the weights that they use, to one
    safetensors file. Programs that do not exist yet are built.

        save_programs(compile_for_generate(model), "model.safetensors")

    `model`: a model from `compile_for_generate`. `load_programs` of the same version of qfx reads
    the file on any processor, without the model, its code and transformers. Raises ValueError for
    any other model, and if a part of a program can only run in PyTorch.
    """
    safetensors()
    steps = getattr(model, "forward", None)
    if not isinstance(steps, Steps):
        raise UserError("save_programs takes a model that compile_for_generate has made faster")
    runners = steps.all_runners(batch_size)
    storing = Storing()
    description = {
        "format": FORMAT,
        "length": steps.length,
        "bits": steps.bits,
        "shapes": steps.shapes,
        "windows": [[name, kind.window] for name, kind in steps.layout.kinds.items()],
        "layers": steps.layout.layers,
        "batch": batch_size,
        "programs": {str(rows): storing.described(r) for rows, r in runners.items()},
    }
    metadata = {KEY: json.dumps(description)}
    write_file(Path(path), lambda file: write_tensors(file, storing.tensors, metadata))
