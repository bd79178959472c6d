"""Graph to graph: the canonical form, and its fused form with the same bits."""
