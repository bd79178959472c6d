"""Whether the files of a folder come from one call of save_pretrained.

transformers writes config.json, then the files of weights one after another, each in its place. A
call that is cut off over an earlier model leaves files of both, which fit each other in all shapes.
So each call writes a number of its own into config.json and into the head of each file.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qfx.files.tensor_file import safetensors
from qfx.io.errors import UserError
from qfx.io.printable import printable

KEY = "qfx_save"


def mark_save(config: Any) -> dict[str, str]:
    """Gives the configuration of a model the number of a new save; the metadata of its files."""
    setattr(config, KEY, secrets.token_hex(8))
    return {KEY: getattr(config, KEY)}


def check_one_save(config: Any, files: Sequence[Path]) -> None:
    """Raises UserError where a file has the number of another save. Files without one, of earlier
    versions and other tools, are not told apart."""
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
            return  # transformers says so when it reads it
        if found != expected:
            raise UserError(
                f"{printable(str(path))} is of save {printable(found)}, and config.json of save "
                f"{printable(str(expected))}: a save_pretrained over an earlier model did not end. "
                "Save the model again"
            )
