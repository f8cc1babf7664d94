"""Figures of all ranks for Lightning's `DeviceStatsMonitor`."""
