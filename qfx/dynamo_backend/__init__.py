"""The backend of `torch.compile`, and tools around Dynamo: running captured graphs in float or in
int8 without compiling them, and recompilation."""

from qfx.dynamo_backend.backend import qfx

__all__ = ["qfx"]
