"""Sums gradients over replicas and shared parameters, and publishes them at `backward`."""
