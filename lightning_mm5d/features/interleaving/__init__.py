"""Microbatches that a stage computes side by side: ``Modality.pipeline.interleaved_microbatches``."""
