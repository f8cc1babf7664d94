"""Sequences sharded over the ranks of a group, with attention that follows the mask of the model."""
