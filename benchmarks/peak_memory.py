"""The memory that a training step takes, as PyTorch's profiler counts it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch


def peak_mb(step: Callable[[], Any]) -> float:
    """Returns the maximum in megabytes of 2^20 bytes that the tensors of a step hold, above what
    lives before it. It should have run before, so that what it keeps exists."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]")) / 2**20
