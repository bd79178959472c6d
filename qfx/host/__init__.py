"""Access to private parts of PyTorch, one file per subsystem. Imports nothing of qfx."""
