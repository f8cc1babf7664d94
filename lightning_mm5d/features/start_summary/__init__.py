"""What a run prints at its start: which rank holds what."""
