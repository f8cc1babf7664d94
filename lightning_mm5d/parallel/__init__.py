"""Parallelism within a stage: replicas and parameters that several stages share."""
