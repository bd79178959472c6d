"""Saves a quantized model as a folder of files and loads it again: `qfx.save`, `qfx.load`."""
