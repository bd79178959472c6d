"""A rewritten graph as a program: its operators run one after the other in C++, on memory that is
laid out once, with no framework between them. What a program has no instruction for runs by PyTorch
between two of them."""

from qfx.programs.build_program import build
from qfx.programs.executor import Runner

__all__ = ["Runner", "build"]
