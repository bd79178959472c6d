"""Smoothing without data: what weights read when a model runs on seeded token ids, and the factors
that follow from it (docs/numerics.md (R4))."""
