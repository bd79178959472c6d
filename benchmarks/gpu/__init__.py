"""Benchmarks of qfx on one GPU, in one command under nine minutes: python -m benchmarks.gpu"""
