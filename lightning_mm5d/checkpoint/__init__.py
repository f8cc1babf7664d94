"""Full checkpoints of any layout: gathered when saved, cut when loaded."""
