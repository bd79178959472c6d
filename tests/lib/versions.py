"""Marks for tests of features that the oldest PyTorch supported by qfx does not have."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

packages = pytest.mark.skipif(
    TORCH <= (2, 11), reason="packages of AOTInductor in PyTorch 2.11 hand operators a wrong dtype"
)
trains_scans = pytest.mark.skipif(
    TORCH <= (2, 11),
    reason="PyTorch 2.11 refuses many a backward of a scan, Inductor without qfx too",
)
several_passes = pytest.mark.skipif(
    TORCH <= (2, 11), reason="Inductor of PyTorch 2.11 takes one pass of the user, not a list"
)
