"""FX graphs without a word of int8: capture, views, writes, bodies, decomposition."""
