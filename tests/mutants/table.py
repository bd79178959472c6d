"""THE table of planted defects, by the folder of csrc/ they are planted in."""

from __future__ import annotations

from tests.mutants.attention import ATTENTION
from tests.mutants.kernels import KERNELS
from tests.mutants.operators import OPERATORS
from tests.mutants.products import PRODUCTS

MUTANTS = (*ATTENTION, *KERNELS, *OPERATORS, *PRODUCTS)
