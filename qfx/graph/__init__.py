"""FX graphs, independent of int8: capture, views, in-place writes, bodies, decomposition."""
