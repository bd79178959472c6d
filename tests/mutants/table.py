"""THE table of planted defects, by the room they are planted in."""

from __future__ import annotations

from tests.mutants.attending import ATTENDING
from tests.mutants.caching import CACHING
from tests.mutants.calibrating import CALIBRATING
from tests.mutants.graphs import GRAPHS
from tests.mutants.keeping import KEEPING
from tests.mutants.modules import MODULES
from tests.mutants.naming import NAMING
from tests.mutants.operators import OPERATORS
from tests.mutants.passes import PASSES
from tests.mutants.planning import PLANNING
from tests.mutants.products import PRODUCTS
from tests.mutants.programs import PROGRAMS
from tests.mutants.rewriting import REWRITING

MUTANTS = (
    *GRAPHS,
    *PLANNING,
    *REWRITING,
    *OPERATORS,
    *MODULES,
    *CALIBRATING,
    *PASSES,
    *PRODUCTS,
    *ATTENDING,
    *CACHING,
    *KEEPING,
    *NAMING,
    *PROGRAMS,
)
