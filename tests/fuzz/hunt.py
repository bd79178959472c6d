"""Runs programs of the fuzz test by hand: `python -m tests.fuzz.hunt FIRST LAST`, in one process.

Prints each program that does not do what its source says, with its seed, and goes on.
"""

from __future__ import annotations

import sys
import warnings

import torch

from qfx.cost.device_models import costs_from
from qfx.cost.model import Costs
from tests.fuzz.checking import Mismatch, Seen, check
from tests.fuzz.draft import program
from tests.lib.costs import Prices

_EACH = 100  # programs between two lines of progress


def main(first: int, last: int) -> int:
    seen, failed = Seen(), []
    for seed in range(first, last):
        try:
            seen += check(program(seed), trains=seed % 4 == 0)
        except Mismatch as mismatch:
            failed.append(seed)
            print(f"seed {seed}: {mismatch}\n", flush=True)
        torch._dynamo.reset()
        if (seed + 1) % _EACH == 0:
            print(f"up to seed {seed}, failed: {failed or 'none'}", flush=True)
    print(f"{seen}\nfailed: {failed or 'none'}; python -m tests.fuzz.hunt SEED SEED+1 repeats one")
    return len(failed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with costs_from(Costs(Prices(2.0))):
        sys.exit(bool(main(*map(int, sys.argv[1:]))))
