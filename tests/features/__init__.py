"""What a Lightning user expects of a trainer, tried on tiny models and compared with one process."""
