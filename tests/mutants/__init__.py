"""Planted defects of C++, and the tests that must see them: `make mutants`.

A row of the tables is a defect: a text of csrc/ that occurs once, what takes its place, and
the fast tests that must then fail. Each is planted alone, in a copy of the tree. A defect that its
tests do not see is a hole in the tests.
"""
