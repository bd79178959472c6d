"""PyTorch's structured trace, which `TORCH_TRACE` writes and tlparse shows."""

from __future__ import annotations

from collections.abc import Callable

import torch


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds a text to the trace. `text` is called only if a trace is written."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
    )
