"""`qfx verify`: whether a saved model computes what it should.

All instructions of a file of programs are qfx's own, and they compute the same bits on every
processor and instruction set. So the hash of its outputs for fixed inputs is the same everywhere,
and two machines compare hashes. For other models a comparison with another form of the model is all
that can be promised, within an SQNR.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import qfx._C as _C
from qfx.command.errors import CommandError
from qfx.command.example_inputs import noise, numbers
from qfx.command.open_model import OpenedModel
from qfx.generate.decoder import Decoder, load_programs
from qfx.generate.graph_file import load_program
from qfx.io.digest import digest_of
from qfx.programs import Runner
from qfx.report.whole_model import floating, output_sqnr

_READS = (7, 1, 1, 16, 1)  # tokens of successive reads of a decoder


@dataclass(frozen=True)
class Hashes:
    """The SHA-256 of a file's outputs, by instruction set."""

    by_isa: dict[str, str]

    @property
    def agree(self) -> bool:
        """Whether every instruction set computes the same bits."""
        return len(set(self.by_isa.values())) == 1


def hashes_of(path: str) -> Hashes:
    """Runs a file of programs on every instruction set of this machine. Raises CommandError for
    another file, and OSError."""
    before, found = _C.isa(), {}
    try:
        for isa in _C.isas():
            _C.set_isa(isa)  # before the file is read, whose weights are packed for it
            found[isa] = digest_of(*_opened(path)())
    finally:
        _C.set_isa(before)
    return Hashes(found)


def _opened(path: str) -> Callable[[], list[Tensor]]:
    """Returns a function that runs the file from its beginning."""
    try:
        decoder = load_programs(path)
    except ValueError as no_decoder:
        try:
            runner = load_program(path)
        except ValueError:
            raise CommandError(str(no_decoder)) from no_decoder
        inputs = _inputs(runner)
        return lambda: [result.clone() for result in runner(*inputs)]
    return lambda: _decoded(decoder)


def _decoded(decoder: Decoder) -> list[Tensor]:
    start = torch.zeros(decoder.batch, 1, dtype=torch.int64, device="cpu")
    vocabulary = decoder.read(start).shape[-1]
    decoder.reset()
    generator, found = torch.Generator().manual_seed(0), []
    for count in _READS:
        if decoder.seen + count <= decoder.length:
            tokens = numbers(vocabulary, (decoder.batch, count), generator)
            found.append(decoder.read(tokens).clone())
    return found


def _inputs(runner: Runner) -> list[Tensor]:
    """Returns small numbers for the inputs of a program: tokens, or normal values."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for view in runner.inputs:
        if view.dtype.is_floating_point:
            found.append(noise(view.sizes, generator).to(view.dtype))
        else:
            found.append(numbers(2, view.sizes, generator).to(view.dtype))
    return found


def compared(opened: OpenedModel, reference: OpenedModel) -> float | None:
    """Returns the SQNR in dB of the outputs of a model for its inputs, relative to those of
    another; None if they have no float outputs. Raises CommandError if the outputs differ in
    shape."""
    with torch.no_grad():
        found = list(floating(opened.model(*reference.args, **reference.kwargs)))
        expected = list(floating(reference.model(*reference.args, **reference.kwargs)))
    if [t.shape for t in found] != [t.shape for t in expected]:
        raise CommandError(f"{opened.where} and {reference.where} have outputs of other shapes")
    return output_sqnr(
        [t.float().flatten() for t in expected], [t.float().flatten() for t in found]
    )
