"""Calibration: turns batches of inputs into a Recipe. The entry point is `qfx.calibrate`."""

from qfx.calibration.calibrate_model import calibrate
from qfx.calibration.observers import OBSERVERS

__all__ = ["OBSERVERS", "calibrate"]
