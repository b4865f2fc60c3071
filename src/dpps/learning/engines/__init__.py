"""Gradients of all nodes: whatever is clever lives here and nowhere else."""
