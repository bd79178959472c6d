"""Weights in memory: packed, cached, fed to compiled code, offloaded; whether they have changed."""
