"""Packed weights: the cache, and how they reach compiled code."""
