"""Private parts of PyTorch that qfx touches, one file a subsystem; imports nothing of qfx."""
