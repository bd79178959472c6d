"""Reads and writes files: safely, as a whole, with locks and caches; also digests and pages of
memory."""
