"""What is told of a model: every matmul with its scheme, error and time."""
