"""Throughput of Lightning's `ThroughputMonitor` where several ranks work on one replica of the data."""
