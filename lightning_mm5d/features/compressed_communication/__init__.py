"""Numbers that travel between ranks in fewer bits: ``Modality.communication.communication_dtype``."""
