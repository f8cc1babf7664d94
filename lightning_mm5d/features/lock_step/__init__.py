"""Steps that no schedule can run: generation, other evaluations of several passes, and manual optimization."""
