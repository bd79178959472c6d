"""Smoothing without data: runs a model on seeded token ids, records the inputs of its weights, and
computes smoothing factors from them (docs/numerics.md (R4))."""
