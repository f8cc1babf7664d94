"""Layers whose forward runs again in their backward: ``Modality.activation_checkpointing``."""
