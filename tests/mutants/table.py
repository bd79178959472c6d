"""THE table of planted defects, by the room they are planted in."""

from __future__ import annotations

from tests.mutants.attending import ATTENDING
from tests.mutants.caching import CACHING
from tests.mutants.calibrating import CALIBRATING
from tests.mutants.cpp_attention import ATTENTION
from tests.mutants.cpp_kernels import KERNELS
from tests.mutants.cpp_operators import OPERATORS as CPP_OPERATORS
from tests.mutants.cpp_products import PRODUCTS
from tests.mutants.graphs import GRAPHS
from tests.mutants.keeping import KEEPING
from tests.mutants.modules import MODULES
from tests.mutants.naming import NAMING
from tests.mutants.operators import OPERATORS
from tests.mutants.planning import PLANNING
from tests.mutants.programs import PROGRAMS
from tests.mutants.rewriting import REWRITING

MUTANTS = (
    *ATTENTION,
    *KERNELS,
    *CPP_OPERATORS,
    *PRODUCTS,
    *GRAPHS,
    *PLANNING,
    *REWRITING,
    *OPERATORS,
    *MODULES,
    *CALIBRATING,
    *ATTENDING,
    *CACHING,
    *KEEPING,
    *NAMING,
    *PROGRAMS,
)
