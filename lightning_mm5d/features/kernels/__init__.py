"""Kernels that a modality names in place of several operations of its modules: ``Modality.compute.kernels``."""
