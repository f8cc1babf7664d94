"""Numbers that travel between ranks in fewer bits: ``Modality.communication_dtype``."""
