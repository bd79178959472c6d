"""Weights in memory: packing, caching, passing them to compiled code, offloading, change
detection."""
