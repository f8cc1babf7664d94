"""Heads whose logits are computed with their loss, in chunks: ``Modality.fused_linear_cross_entropy``."""
