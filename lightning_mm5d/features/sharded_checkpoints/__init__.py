"""Sharded checkpoints: a folder to which each rank writes its own shards, and of which it reads what it holds."""
