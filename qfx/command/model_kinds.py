"""The kinds of models that commands read, told by the content of a folder or file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qfx.command.errors import CommandError

Kind = Literal["transformers", "qfx", "gguf", "exported", "programs"]
NAMES: dict[Kind, str] = {
    "transformers": "a model of transformers",
    "qfx": "a folder of qfx.save",
    "gguf": "a GGUF file",
    "exported": "a program of torch.export",
    "programs": "a file of programs",
}


def kind_of(model: str) -> Kind:
    """Returns the kind of a path. What is no path is the name of a model of transformers, as
    `from_pretrained` takes it. Raises CommandError for a path that holds none of these."""
    path = Path(model)
    if not path.exists():
        if (
            path.is_absolute()
            or model.startswith(".")
            or model.count("/") > 1
            or path.suffix in _SUFFIXES
        ):
            raise CommandError(f"{model} does not exist")
        return "transformers"
    if path.is_dir():
        for name, kind in _FOLDERS.items():
            if (path / name).is_file():
                return kind
        raise CommandError(
            f"{model} has neither config.json, as models of transformers, nor qfx.json, as those "
            "of qfx.save"
        )
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    raise CommandError(
        f"{model} is none of {', '.join(NAMES.values())}: files of them end in "
        f"{', '.join(_SUFFIXES)}"
    )


_FOLDERS: dict[str, Kind] = {"config.json": "transformers", "qfx.json": "qfx"}
_SUFFIXES: dict[str, Kind] = {".gguf": "gguf", ".pt2": "exported", ".safetensors": "programs"}
