"""Loads models that other tools have quantized, with their codes and scales unchanged."""
