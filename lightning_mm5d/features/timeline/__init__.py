"""The timeline of a run's last whole training step, measured beside simulated, in a file: ``timeline``."""
