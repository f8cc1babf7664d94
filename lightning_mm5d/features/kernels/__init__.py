"""Kernels that a modality names, in place of what its modules compute with several operations: ``Modality.kernels``."""
