"""Calibration: batches of inputs -> a Recipe. `qfx.calibrate` is the way in."""

from qfx.calibration.calibrate_model import calibrate
from qfx.calibration.observers import OBSERVERS

__all__ = ["OBSERVERS", "calibrate"]
