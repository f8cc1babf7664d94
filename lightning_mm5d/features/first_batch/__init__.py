"""Compares what first batches give with what their microbatches give: losses, logs, results and buffers."""
