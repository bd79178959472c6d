"""Utilities for FX graphs, independent of int8: capture, views, in-place writes, subgraphs of
higher-order operators, decomposition."""
