"""Copies that autocast makes of weights, kept over the microbatches of a step."""
