"""Layers sharded over the ranks of a group: plans, where they come from, and what they make of a layer."""
