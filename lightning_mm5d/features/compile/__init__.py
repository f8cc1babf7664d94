"""Layers that torch.compile compiles: ``compile``."""
