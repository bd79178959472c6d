"""Detects whether a file, a folder or a state dict is a model of another tool, and of which
tool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from qfx.files.foreign.compressed import compressed_model
from qfx.files.foreign.compressed_config import METHOD, method_of
from qfx.files.foreign.gguf_model import gguf_model
from qfx.files.foreign.gguf_table import MAGIC
from qfx.files.foreign.state_dict_import import Foreign
from qfx.files.foreign.torchao import is_torchao, torchao_file, torchao_state
from qfx.files.manifest import NAME
from qfx.io.errors import UserError, printable
from qfx.io.safe_read import first_bytes, opened


def foreign_of(source: str | Path | Mapping[str, Any], skeleton: nn.Module) -> Foreign | None:
    """Returns the model of another tool; None for files that `qfx.save` may have written, and for a
    plain safetensors file. Raises UserError, which names the file and what is wrong, or OSError."""
    if isinstance(source, Mapping):
        return torchao_state(source)
    path = Path(source)
    if path.is_dir():
        return _folder(path, skeleton)
    with opened(path) as file:
        magic = first_bytes(file, len(MAGIC))
    if magic == MAGIC:
        return gguf_model(path, skeleton)
    return torchao_file(path) if is_torchao(path, magic) else None


def _folder(path: Path, skeleton: nn.Module) -> Foreign | None:
    if (path / NAME).exists() or not (path / "config.json").exists():
        return None
    method = method_of(path)
    if method == METHOD:
        return compressed_model(path, skeleton)
    if method not in (None, "qfx"):
        raise UserError(
            f"{printable(str(path))} is quantized by {printable(str(method))}, and qfx.load reads "
            f"{METHOD}"
        )
    return None
