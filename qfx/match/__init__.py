"""The matmuls of a graph: how they are spelled, what they multiply, what they are called."""
