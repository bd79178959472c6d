"""Mutation tests of the Python lines that changed: `make mutate`.

mutmut's operators make small defects (mutants) on the changed lines of qfx/. The tests that run
these lines are recorded once. Then each mutant is planted alone, in a copy of the tree, and these
tests run until one fails. A mutant that survives is a gap in the tests, or equivalent to the code.
"""
