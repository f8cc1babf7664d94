"""One call of an encoder for several microbatches: ``Modality.pipeline.microbatches_per_call``."""
