"""The interface of the whole-model benchmark: ways to run a model, of which peers are never
required."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions

from torch import Tensor, nn

from benchmarks.subjects import Inputs
from qfx import _C

# The hidden state, then the logits where the model has them; None for what a peer does not give.
Answers = Sequence[Tensor | None]
Run = Callable[[], Answers]
Prepare = Callable[[nn.Module, Inputs], Run]
WRONG_DB = 10.0  # an error of a third of the norm: more than that of any format measured here


class UnsupportedError(Exception):
    """Raised if a peer is installed but cannot run this model. The message says why, in one
    sentence."""


def reason(why: Exception) -> str:
    """Returns why a peer does not run: it may raise anything, and its row says what."""
    known = isinstance(why, UnsupportedError)
    return str(why) if known else f"{type(why).__name__}: {why}".split("\n")[0]


def wrong(db: float) -> str | None:
    """Returns a sentence, the row's instead of a time, if outputs with this SQNR are wrong."""
    return f"Its outputs are wrong: {db:.2f} dB." if db < WRONG_DB else None


@dataclass(frozen=True)
class Way:
    """One way to run a model. `prepare(model, inputs)` returns a call that runs the model on these
    inputs and imports what it needs. `isa`: the instruction set of qfx's kernels, if they are used.
    `packages`: those it needs, by their names for pip."""

    prepare: Prepare
    isa: str | None = None
    packages: tuple[str, ...] = ()

    def set_isa(self) -> None:
        if self.isa:
            _C.set_isa(self.isa)


def missing(packages: Sequence[str]) -> str | None:
    """Returns what to install, as a sentence, or None if all packages are installed."""
    lacks = [p for p in packages if not any(distributions(name=p))]
    return f"Not installed: pip install {' '.join(lacks)}." if lacks else None
