"""Layers whose forward runs again in their backward: ``Modality.memory.activation_checkpointing``."""
