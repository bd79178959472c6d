"""Rewriting of graphs: into the canonical form, and from it into a fused form with the same
bits."""
