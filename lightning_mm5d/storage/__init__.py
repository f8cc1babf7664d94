"""Files of checkpoints and weights: tensors read and written in parts, manifests, and state as JSON."""
