"""Throughput of `ThroughputMonitor` and `ModalityThroughput` where several ranks work on one replica of the data."""
