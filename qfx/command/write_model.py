"""The forms in which commands write a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import qfx
from qfx.command.errors import CommandError
from qfx.command.model_kinds import NAMES
from qfx.command.open_model import OpenedModel


def write_model(opened: OpenedModel, out: Path, form: str, max_length: int) -> str:
    """Writes a model to `out`, a folder or file that does not exist yet. Returns what was written,
    in words. `max_length`: of the tokens of a file of programs. Raises CommandError for a form that
    this kind of model does not have."""
    if form not in FORMS:
        raise CommandError(f"{form} is none of the forms {', '.join(FORMS)}")
    if out.exists():
        raise CommandError(f"{out} exists: name a new {'folder' if form in _FOLDERS else 'file'}")
    if out.parent != Path() and not out.parent.is_dir():
        raise CommandError(f"the folder {out.parent} does not exist")
    FORMS[form](opened, out, max_length)
    files = [path for path in out.rglob("*") if path.is_file()] if out.is_dir() else [out]
    size = sum(path.stat().st_size for path in files)
    return f"wrote {out}, {len(files)} file{'s' * (len(files) > 1)}, {size / 1e6:.1f} MB"


def _transformers(opened: OpenedModel, out: Path, max_length: int) -> None:
    model: Any = opened.model
    if opened.folder is None:
        raise CommandError(f"{opened.where} is {NAMES[opened.kind]}, and no model of transformers")
    model.save_pretrained(out)
    if opened.tokenizer is not None:
        opened.tokenizer.save_pretrained(out)


def _qfx(opened: OpenedModel, out: Path, max_length: int) -> None:
    qfx.save(opened.model, out)


def _programs(opened: OpenedModel, out: Path, max_length: int) -> None:
    """Writes the programs of a decoder's steps, or one for the shapes of another model's inputs."""
    from qfx.generate import compile_for_generate, save_program, save_programs
    from qfx.programs import build

    model: Any = opened.model
    if hasattr(model, "generate") and getattr(model, "can_generate", bool)():
        batch = next(iter(opened.kwargs.values())).shape[0]
        made = compile_for_generate(model, max_length=max_length, batch_sizes=(batch,))
        save_programs(made, out, batch_size=batch)
        return
    with torch.no_grad():
        program = torch.export.export(model, opened.args, kwargs=opened.kwargs)
        graph, _ = qfx.rewrite(program.module())
        inputs = [*opened.args, *opened.kwargs.values()]
        save_program(build(graph, inputs), out)


def _exported(opened: OpenedModel, out: Path, max_length: int) -> None:
    with torch.no_grad():
        torch.export.save(_program(opened), out)


def _onnx(opened: OpenedModel, out: Path, max_length: int) -> None:
    table = qfx.onnx_translation_table()
    with torch.no_grad():
        torch.onnx.export(
            _program(opened), f=out, opset_version=21, custom_translation_table=table, verbose=False
        )


def _program(opened: OpenedModel) -> torch.export.ExportedProgram:
    return torch.export.export(opened.model, opened.args, kwargs=opened.kwargs_without_cache)


FORMS: dict[str, Callable[[OpenedModel, Path, int], None]] = {
    "transformers": _transformers,
    "qfx": _qfx,
    "programs": _programs,
    "exported": _exported,
    "onnx": _onnx,
}
_FOLDERS = ("transformers", "qfx")
