"""Reports about a model: every matmul with its scheme, error and time."""
