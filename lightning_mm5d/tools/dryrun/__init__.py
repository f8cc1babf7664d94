"""Dry runs: one rank's real code in one process, on tensors whose memory nothing touches."""
