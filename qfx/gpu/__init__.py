"""GPUs: what this build can run on one, and what it is known to cost there."""
