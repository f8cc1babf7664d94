"""Gradients, optimizer states and parameters that data parallel ranks share (`zero_stage` 1, 2 and 3)."""
