"""What the first batch of a run shows of its losses and frozen weights."""
