"""The policy: which matmuls run in int8, and how."""
