"""Loads models that other tools have quantized, with their int8 codes and scales unchanged."""
