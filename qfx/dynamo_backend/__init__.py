"""The backend of `torch.compile`, the capture of graphs that run in float, and what makes Dynamo
compile anew."""

from qfx.dynamo_backend.backend import qfx

__all__ = ["qfx"]
