"""What a loss or gradient that is not finite does to a step: ``on_nonfinite``."""
