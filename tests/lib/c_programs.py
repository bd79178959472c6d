"""The C API of programs (csrc/include/qfx/programs.h), called from Python."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_uint8, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = (
    torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.bfloat16,
    torch.float16,
)  # fmt: skip
STATUS = ("ok", "argument", "file", "refused", "memory", "failed")


class CArray(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int), ("axes", c_int64), ("sizes", POINTER(c_int64)), ("bytes", c_int64),
    )  # fmt: skip


class CDecoder(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in ("batch", "length", "vocabulary", "seen"))


class CError(Exception):
    """A status that is not QFX_OK, by name, and the sentence of qfx_error."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


class CLibrary:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.qfx_error.restype = self.c.qfx_version.restype = c_char_p
        self.c.qfx_program_inputs.restype = self.c.qfx_program_results.restype = c_int64
        self.c.qfx_program_free.restype = None

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.c, name)(*arguments)
        if status:
            raise CError(STATUS[status], self.c.qfx_error().decode())

    def set_threads(self, count: int) -> None:
        self.call("qfx_set_threads", c_int64(count))

    def load(self, path: Path | str, max_memory: int = 0) -> CProgram:
        return CProgram(self, str(path), max_memory)


class CProgram:
    """A loaded file of programs, freed with this object."""

    def __init__(self, library: CLibrary, path: str, max_memory: int) -> None:
        self.library, self.handle = library, c_void_p()
        load = (path.encode(), c_int64(max_memory), byref(self.handle))
        library.call("qfx_program_load", *load)

    def __del__(self) -> None:
        self.library.c.qfx_program_free(self.handle)

    def decoder(self) -> CDecoder:
        found = CDecoder()
        self.library.call("qfx_program_decoder", self.handle, byref(found))
        return found

    def reset(self) -> None:
        self.library.call("qfx_program_reset", self.handle)

    def read(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits [B, V], as `Decoder.read` returns them."""
        about = self.decoder()
        logits = torch.empty(about.batch, about.vocabulary)
        tokens = tokens.long().contiguous()
        kept = None if mask is None else mask.to(torch.uint8).contiguous()
        self.library.call(
            "qfx_program_read", self.handle,
            ctypes.cast(tokens.data_ptr(), POINTER(c_int64)),
            None if kept is None else ctypes.cast(kept.data_ptr(), POINTER(c_uint8)),
            c_int64(tokens.shape[1]), ctypes.cast(logits.data_ptr(), POINTER(c_float)),
        )  # fmt: skip
        return logits

    def kinds(self, of: str) -> list[tuple[torch.dtype, list[int], int]]:
        """Dtype, shape and bytes of each of the "inputs" or "results"."""
        found = []
        for i in range(getattr(self.library.c, f"qfx_program_{of}")(self.handle)):
            array = CArray()
            self.library.call(f"qfx_program_{of[:-1]}", self.handle, c_int64(i), byref(array))
            found.append((DTYPES[array.dtype], list(array.sizes[: array.axes]), array.bytes))
        return found

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """The results of a graph of fixed shapes."""
        found = [torch.empty(sizes, dtype=dtype) for dtype, sizes, _ in self.kinds("results")]
        given = (c_void_p * max(len(inputs), 1))(*(t.data_ptr() for t in inputs))
        results = (c_void_p * max(len(found), 1))(*(t.data_ptr() for t in found))
        self.library.call("qfx_program_run", self.handle, given, results)
        return found
