"""Runs the actions of a schedule on one rank: transport, groups, random state."""
