"""Heads whose logits are computed with their loss, in chunks: ``Modality.compute.fused_linear_cross_entropy``."""
