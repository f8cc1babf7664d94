"""Multimodal models composed of unimodal ones. It knows torch and transformers, neither Lightning nor ranks."""
