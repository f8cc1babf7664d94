"""Features of a frozen encoder that are computed once and kept on disk: ``Modality.memory.cache_features``."""
