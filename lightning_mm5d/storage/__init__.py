"""Files of checkpoints and weights: tensors read and written in parts, replaced as a whole, and state as JSON."""
