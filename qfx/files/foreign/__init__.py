"""Models that other tools have quantized: their codes and scales, as they are."""
