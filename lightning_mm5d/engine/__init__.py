"""Runs the actions of a schedule: microbatches, transport, random state, captured logs."""
