"""Checks whether the files of a folder come from one call of save_pretrained.

transformers writes config.json, then the files of weights, one after another, over the earlier
files. If such a call is interrupted, files of two models remain, whose shapes all fit each other.
Therefore each call writes a random number into config.json and into the header of each file.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qfx.files.tensor_file import safetensors
from qfx.io.errors import UserError, printable

KEY = "qfx_save"


def mark_save(config: Any) -> dict[str, str]:
    """Sets the number of a new save in the config of a model; returns the metadata for its
    files."""
    setattr(config, KEY, secrets.token_hex(8))
    return {KEY: getattr(config, KEY)}


def check_one_save(config: Any, files: Sequence[Path]) -> None:
    """Raises UserError if a file has the number of another save. Files without a number, from
    earlier versions and other tools, are accepted."""
    expected = getattr(config, KEY, None)
    if expected is None:
        return
    library = safetensors()
    for path in files:
        if path.suffix != ".safetensors":
            continue
        try:
            with library.safe_open(path, "pt") as file:
                found = (file.metadata() or {}).get(KEY, expected)
        except library.SafetensorError:
            return  # transformers reports it when it reads the file
        if found != expected:
            raise UserError(
                f"{printable(str(path))} is of save {printable(found)}, and config.json of save "
                f"{printable(str(expected))}: a save_pretrained over an earlier model did not end. "
                "Save the model again"
            )
