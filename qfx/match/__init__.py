"""The matmuls of a graph: how they are written, what they multiply, and their names in the
model."""
