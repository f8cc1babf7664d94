"""Layers sharded over a grid of tensor parallel ranks, 2D (SUMMA), 2.5D and 3D: ``Modality.tensor.tp_mode``."""
