"""The backend of `torch.compile`, the capture of graphs that run in float, and recompilation."""

from qfx.dynamo_backend.backend import qfx

__all__ = ["qfx"]
