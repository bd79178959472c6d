"""Private parts of PyTorch that qfx uses, one file per subsystem. Imports nothing of qfx."""
