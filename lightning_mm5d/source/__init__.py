"""Reads the source code of users' modules and models: what a method takes, reads and calls."""
