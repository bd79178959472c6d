"""A quantized model as a folder of files: `qfx.save`, `qfx.load`."""
