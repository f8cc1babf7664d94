"""Tensors of batches that a rank never reads stay in host memory."""
