"""Models in the formats of other programs, each converted once, into a cache folder."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import nn

from examples.minilm import cache_folder


def converted(form: str, model: nn.Module, write: Callable[[Path], object]) -> Path:
    """Returns the file or folder to which `write` converts the model, made at the first call.
    `form`: the name of the format, with the version of the converter."""
    return made(cache_folder() / "peers" / f"{form}-{fingerprint(model)}", write)


def made(path: Path, write: Callable[[Path], object]) -> Path:
    """Returns the file or folder `path`, which `write` creates at the first call at the path passed
    to it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            write(Path(scratch) / "model")
            (Path(scratch) / "model").replace(path)  # complete, or not there
    return path


def fingerprint(model: nn.Module) -> str:
    """Returns a digest of the configuration, the names and every byte of the weights."""
    found = hashlib.sha256(str(getattr(model, "config", type(model))).encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(memoryview(tensor.detach().contiguous().numpy()).cast("B"))
    return found.hexdigest()[:16]
