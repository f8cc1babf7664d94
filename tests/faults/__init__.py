"""Seeded faults on real process trees, and wrong configurations: what each run ends with, in figures."""
