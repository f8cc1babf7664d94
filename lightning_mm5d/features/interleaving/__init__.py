"""Microbatches that a stage computes side by side: ``Modality.interleaved_microbatches``."""
