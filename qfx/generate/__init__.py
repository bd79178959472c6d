"""Decoding with int8 programs for language models of transformers, and files of these programs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qfx.generate.compile_model import compile_for_generate
    from qfx.generate.decoder import Decoder, load_programs
    from qfx.generate.export import save_programs
    from qfx.generate.graph_file import load_program, save_program

__all__ = [
    "Decoder",
    "compile_for_generate",
    "load_program",
    "load_programs",
    "save_program",
    "save_programs",
]
_HOMES = {
    "compile_for_generate": "qfx.generate.compile_model",
    "save_programs": "qfx.generate.export",
    "Decoder": "qfx.generate.decoder",
    "load_programs": "qfx.generate.decoder",
    "save_program": "qfx.generate.graph_file",
    "load_program": "qfx.generate.graph_file",
}


def __getattr__(name: str) -> Any:  # lazy, so that reading a file does not import transformers
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
