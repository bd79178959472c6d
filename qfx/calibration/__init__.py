"""Calibration: runs a model on batches of inputs and decides how each of its matmuls is quantized
(a Recipe). The entry point is `qfx.calibrate`."""

from qfx.calibration.calibrate_model import calibrate
from qfx.calibration.observers import OBSERVERS

__all__ = ["OBSERVERS", "calibrate"]
