"""The weights of a language model of transformers as a file for llama.cpp, by its own converter."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.converted import converted
from benchmarks.peer import UnsupportedError

VARIABLE = "LLAMA_CPP"  # the folder of llama.cpp's sources, which contain the converter
KNOWN, BLOCK = ("llama", "qwen3", "gemma3_text"), 32


def gguf_file(model: Any, folder: Path, kind: str) -> Path:
    """Returns the file of a model saved in `folder` with its tokenizer, in Q8_0 or Q4_0; made at
    the first call.

    Raises UnsupportedError if the converter is missing, or does not take the model.
    """
    check(model.config)
    script = Path(os.environ.get(VARIABLE, "llama.cpp")) / "convert_hf_to_gguf.py"
    return converted(f"gguf-{kind.lower()}", model, partial(_write, script, folder, kind))


def check(config: Any) -> None:
    """Raises UnsupportedError if llama.cpp would run another model."""
    if config.model_type not in KNOWN:
        known, kind = ", ".join(KNOWN), config.model_type
        raise UnsupportedError(f"GGUF files are written here for {known}, and this is {kind}.")
    if config.hidden_size % BLOCK or config.intermediate_size % BLOCK:
        sizes = f"{config.hidden_size} and {config.intermediate_size}"
        raise UnsupportedError(f"Q8_0 has blocks of {BLOCK}, which do not divide {sizes}.")


def _write(script: Path, folder: Path, kind: str, path: Path) -> None:
    import llama_cpp

    if not script.exists():
        raise UnsupportedError(f"There is no {script}: set {VARIABLE} to llama.cpp's sources.")
    whole = path.with_suffix(".f32")
    command = [sys.executable, str(script), str(folder), "--outtype", "f32", "--outfile"]
    done = subprocess.run([*command, str(whole)], capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(["The converter failed.", *done.stderr.strip().splitlines()][-1])
    given = llama_cpp.llama_model_quantize_default_params()
    given.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    names = str(whole).encode(), str(path).encode()
    if status := llama_cpp.llama_model_quantize(*names, ctypes.byref(given)):
        raise UnsupportedError(f"llama.cpp does not quantize to {kind}: it gave {status}.")
