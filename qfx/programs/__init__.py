"""Programs: a rewritten graph whose operators run one after the other in C++, in memory that is
laid out once, without a framework between them. Operators for which programs have no instruction
are run by PyTorch between two programs."""

from qfx.programs.build_program import build
from qfx.programs.executor import Runner

__all__ = ["Runner", "build"]
