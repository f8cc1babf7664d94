"""Samples are dealt to microbatches so that each has as much for every encoder to do."""
