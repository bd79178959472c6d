"""Which matmuls run in int8, and how: all policy."""
