"""Samples are dealt to microbatches and replicas so that each has as much for every encoder to do."""
