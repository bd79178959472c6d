"""Models in the formats of other programs, each converted once, into a cache folder."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import nn

from examples.minilm import cache_folder


def converted(form: str, model: nn.Module, write: Callable[[Path], object]) -> Path:
    """The file or folder that `write` makes of the model at the path it is given; made at the
    first call. `form`: the name of the format, with the version of what writes it."""
    return made(cache_folder() / "peers" / f"{form}-{fingerprint(model)}", write)


def made(path: Path, write: Callable[[Path], object]) -> Path:
    """The file or folder `path`, which `write` makes at the path it is given, at the first call."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            write(Path(scratch) / "model")
            (Path(scratch) / "model").replace(path)  # complete, or not there
    return path


def fingerprint(model: nn.Module) -> str:
    """Of the configuration, the names and every byte of the weights."""
    found = hashlib.sha256(str(getattr(model, "config", type(model))).encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(memoryview(tensor.detach().contiguous().numpy()).cast("B"))
    return found.hexdigest()[:16]
